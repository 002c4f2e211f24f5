"""The shape of an answer that a body asks for; it does not concern the generation."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.generation.prepared_generation import PreparedGeneration
from cluster.models.served_model import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """A prepared generation, its model, and what is written around its text."""

    generation: PreparedGeneration
    model: ServedModel
    created_s: int
    include_usage: bool = False
    """A streamed answer ends with the usage."""
    echoes: tuple[str, ...] = ()
    """Text put before the answer of each prompt, or empty."""
    echoes_logprobs: bool = False
    """The echo has log-probabilities, as many as the answer."""
    num_prompt_logprobs: int | None = None
    """Alternatives in the answer's own list of the prompt's log-probabilities (an extension); None leaves the list out."""
    metadata: dict[str, str] | None = None
    """Echoed in a whole chat answer."""

    def echo(self, index: int) -> str:
        """Text that comes before the answer of choice `index`."""
        return self.echoes[index // self.generation.params.n] if self.echoes else ""
