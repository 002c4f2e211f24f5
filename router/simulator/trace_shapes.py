"""Published statistics of public traces of LLM servers.

Mooncake (Qin et al., FAST '25): rates, mean lengths and prefix shares of its conversation, synthetic and tool-and-agent traces.
Azure 2023 (Patel et al., Splitwise, ISCA 2024): the code and the conversation trace. Medians, 90th and 99th percentiles and maxima
are those of the published files; the quantiles between them are chosen to give the published means.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.simulator.length_curve import LengthCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFamily:
    """Requests of one origin: their lengths, and the prefixes that they share."""

    share: float = 1.0
    """Share of the trace's requests."""
    prompt_tokens: LengthCurve
    output_tokens: LengthCurve
    num_common_blocks: int = 0
    """Blocks of 512 tokens at the start of every prompt of the family: instructions and tools."""
    new_blocks: LengthCurve | None = None
    """Blocks that a prompt adds to the earlier prompt that it continues; None when prompts never continue others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShape:
    """One public trace: its arrivals, its families of requests, and the share of repeated prompt blocks."""

    rate_per_s: float
    gap_variation: float = 1.0
    """Coefficient of variation of the time between arrivals: 1 for a Poisson process, more for bursts."""
    burst_rate_per_s: float | None = None
    """Rate within a burst; None when arrivals do not come in bursts."""
    tick_s: float | None = None
    """Arrivals are recorded at multiples of this."""
    prefix_share: float = 0.0
    """Share of all prompt blocks that an unbounded cache would already hold."""
    gap_to_parent_s: LengthCurve = LengthCurve((0, 3), (0.5, 123), (0.9, 483), (1, 1_500))
    """Time between a prompt and the earlier prompt that it continues."""
    families: tuple[RequestFamily, ...]


_CHAT_OUTPUT = LengthCurve((0, 1), (0.1, 24), (0.25, 150), (0.5, 350), (0.75, 475), (0.9, 597), (0.99, 1_120), (1, 2_000))
_CHAT_NEW_BLOCKS = LengthCurve((0, 1), (0.25, 1.5), (0.5, 2), (0.75, 8), (0.9, 21), (0.99, 57), (1, 186))

_CONVERSATION = TraceShape(
    rate_per_s=3.40,
    tick_s=3.0,
    prefix_share=0.366,
    families=(
        RequestFamily(
            prompt_tokens=LengthCurve(
                (0, 891), (0.1, 970), (0.25, 2_508), (0.5, 6_909), (0.75, 15_600),
                (0.9, 27_367), (0.95, 38_000), (0.99, 85_401), (1, 126_195),
            ),
            output_tokens=_CHAT_OUTPUT,
            num_common_blocks=1,
            new_blocks=_CHAT_NEW_BLOCKS,
        ),
    ),
)  # fmt: skip
_SYNTHETIC = TraceShape(
    rate_per_s=3.91,
    prefix_share=0.640,
    gap_to_parent_s=LengthCurve((0, 0.1), (0.1, 6), (0.5, 64), (0.9, 294), (1, 800)),
    families=(
        RequestFamily(
            prompt_tokens=LengthCurve(
                (0, 13), (0.1, 30), (0.25, 277), (0.35, 2_400), (0.5, 11_587), (0.75, 23_175), (0.9, 38_615), (0.99, 66_458),
                (0.998, 100_000), (1, 191_378),
            ),
            output_tokens=LengthCurve((0, 1), (0.1, 4), (0.25, 11), (0.5, 69), (0.75, 245), (0.9, 389), (0.99, 769), (1, 893)),
            new_blocks=LengthCurve((0, 0.5), (0.25, 1), (0.75, 1.5), (0.9, 2), (0.99, 4), (1, 8)),
        ),
    ),
)  # fmt: skip
_TOOLAGENT = TraceShape(
    rate_per_s=6.67,
    tick_s=3.0,
    prefix_share=0.59,
    families=(
        # long chats under one system prompt, calls with many tools, calls with few
        RequestFamily(
            share=0.49,
            prompt_tokens=LengthCurve(
                (0, 800), (0.1, 1_300), (0.25, 3_000), (0.5, 6_800), (0.75, 14_000),
                (0.9, 25_000), (0.95, 36_000), (0.99, 75_000), (1, 126_000),
            ),
            output_tokens=LengthCurve((0, 1), (0.1, 30), (0.25, 160), (0.5, 365), (0.75, 500), (0.9, 640), (0.99, 1_150), (1, 2_000)),
            num_common_blocks=1,
            new_blocks=_CHAT_NEW_BLOCKS,
        ),
        RequestFamily(
            share=0.37,
            prompt_tokens=LengthCurve((0, 6_150), (1, 8_200)),
            output_tokens=LengthCurve((0, 3), (0.8, 3), (1, 24)),
            num_common_blocks=12,
        ),
        RequestFamily(
            share=0.14, prompt_tokens=LengthCurve((0, 3_000), (1, 3_500)), output_tokens=LengthCurve((0, 16), (1, 24)), num_common_blocks=5
        ),
    ),
)  # fmt: skip
_AZURE_CODE = TraceShape(
    rate_per_s=2.57,
    gap_variation=13.2,
    burst_rate_per_s=22.0,
    families=(
        RequestFamily(
            prompt_tokens=LengthCurve(
                (0, 3), (0.1, 180), (0.25, 660), (0.5, 1_469),
                (0.75, 2_850), (0.9, 5_194), (0.99, 7_436), (1, 7_437),
            ),
            output_tokens=LengthCurve(
                (0, 1), (0.1, 5), (0.25, 8), (0.5, 13), (0.75, 23),
                (0.9, 55), (0.95, 95), (0.99, 252), (0.999, 600), (1, 1_899),
            ),
        ),
    ),
)  # fmt: skip
_AZURE_CONVERSATION = TraceShape(
    rate_per_s=5.53,
    gap_variation=1.09,
    burst_rate_per_s=6.0,
    families=(
        RequestFamily(
            prompt_tokens=LengthCurve(
                (0, 2), (0.01, 29), (0.05, 181), (0.1, 207), (0.25, 396),
                (0.5, 1_020), (0.75, 1_189), (0.9, 2_735), (0.95, 4_083), (0.99, 4_142),
                (0.999, 6_179), (1, 14_050),
            ),
            output_tokens=LengthCurve(
                (0, 7), (0.05, 41), (0.1, 54), (0.5, 129), (0.6, 177),
                (0.75, 395), (0.9, 424), (0.99, 601), (1, 1_000),
            ),
        ),
    ),
)  # fmt: skip

SHAPES = {
    "conversation": _CONVERSATION,
    "synthetic": _SYNTHETIC,
    "toolagent": _TOOLAGENT,
    "azure-code": _AZURE_CODE,
    "azure-conversation": _AZURE_CONVERSATION,
}
