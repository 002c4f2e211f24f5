"""The duration of a step: a roofline per kind of operator, from published sizes and speeds."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.speculation.step_cost import StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes of a model that determine a step's cost, from its published config.json."""

    name: str
    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_value: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value

    @property
    def weight_bytes(self) -> float:
        return self.num_params * self.bytes_per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that replicas run on. Peak figures are the vendors'; the shares that are reached are assumptions."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    compute_share: float
    """Share of the peak that large matrix products reach."""
    bandwidth_share: float
    overhead_s: float
    """Fixed time per step: launches, sampling, communication between devices."""


MODELS = {
    # meta-llama/Llama-3.1-8B and -70B, config.json
    "8b": ModelSize(name="Llama-3.1-8B", num_params=8.03e9, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128),
    "70b": ModelSize(name="Llama-3.1-70B", num_params=70.6e9, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128),
    # HuggingFaceTB/SmolLM2-135M-Instruct, config.json
    "135m": ModelSize(name="SmolLM2-135M", num_params=134.5e6, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64),
}

DEVICES = {
    # NVIDIA H100 SXM data sheet: 989 TFLOP/s dense bf16, 3.35 TB/s, 80 GB. H200: 4.8 TB/s, 141 GB.
    "h100": Device(
        name="H100 SXM",
        flops_per_s=989e12,
        bytes_per_s=3.35e12,
        memory_bytes=80e9,
        compute_share=0.55,
        bandwidth_share=0.8,
        overhead_s=0.004,
    ),
    "h200": Device(
        name="H200 SXM",
        flops_per_s=989e12,
        bytes_per_s=4.8e12,
        memory_bytes=141e9,
        compute_share=0.55,
        bandwidth_share=0.8,
        overhead_s=0.004,
    ),
    # Two Zen 5 cores, measured with the 135m model: 900 GFLOP/s bf16, 40 GB/s (some of the weights stay in cache).
    "cpu": Device(
        name="2 Zen 5 cores",
        flops_per_s=900e9,
        bytes_per_s=40e9,
        memory_bytes=8e9,
        compute_share=0.9,
        bandwidth_share=1.0,
        overhead_s=0.001,
    ),
}


class StepTimer:
    """Predicts the seconds of one step of `model` on `num_devices` of `device`, which share the work evenly.

    Linear layers and attention are separate operators, each bound by compute or by memory (the roofline model, Williams et
    al., CACM 52(4), 2009); their times add up. The tokens of a chunk read its context once.
    """

    def __init__(self, model: ModelSize, device: Device, num_devices: int = 1) -> None:
        self.model = model
        self.device = device
        self.num_devices = num_devices
        self._flops_per_s = device.flops_per_s * device.compute_share * num_devices
        self._bytes_per_s = device.bytes_per_s * device.bandwidth_share * num_devices
        self._attention_flops = 4.0 * model.num_layers * model.num_heads * model.head_dim
        self._weights_s = model.weight_bytes / self._bytes_per_s

    def step_s(self, num_tokens: int, num_attended: float, num_context_tokens: int) -> float:
        """Seconds of a step. `num_attended`: (query, key) pairs over all chunks; `num_context_tokens`: keys read, once per chunk."""
        linear_s = max(2.0 * self.model.num_params * num_tokens / self._flops_per_s, self._weights_s)
        attention_s = max(
            self._attention_flops * num_attended / self._flops_per_s,
            self.model.kv_bytes_per_token * num_context_tokens / self._bytes_per_s,
        )
        return self.device.overhead_s + linear_s + attention_s

    def step_cost(self, max_rows: int) -> StepCost:
        """The seconds of decode steps by their rows, as an engine measures them at load."""
        rows = sorted({*range(1, min(max_rows, 16) + 1), *(2**power for power in range(max_rows.bit_length())), max_rows})
        return StepCost(
            num_rows=rows,
            row_s=[self.step_s(num_rows, 0, 0) for num_rows in rows],
            context_s=self._attention_flops / self._flops_per_s,
        )

    @property
    def prefill_tokens_per_s(self) -> float:
        """Rate of short prompts, where attention is negligible: a prior for the router."""
        return self._flops_per_s / (2.0 * self.model.num_params)

    def num_blocks(self, block_size: int, memory_share: float = 0.9) -> int:
        """KV blocks that fit in memory beside the weights."""
        left = self.device.memory_bytes * self.num_devices * memory_share - self.model.weight_bytes
        return max(1, int(left / (self.model.kv_bytes_per_token * block_size)))
