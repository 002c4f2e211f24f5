"""Measures the baselines: transformers' static batches and its continuous batching."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.utils import WorkloadHints

from tests.bench.workload_source import Workload

_SILENCE_LIMIT_S = 600.0


def load(folder: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """With SDPA attention, transformers' own default and its fastest on a CPU."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()


@torch.inference_mode()
def run_static(model: PreTrainedModel, workload: Workload, batch_size: int, note: Callable[[str], None]) -> float:
    """Seconds for the workload in batches in order of arrival, left padded; each runs until its longest answer is done.

    The cache is `generate`'s own default, a DynamicCache.
    """
    start_s = time.perf_counter()
    for first in range(0, len(workload.prompt_ids), batch_size):
        prompts = workload.prompt_ids[first : first + batch_size]
        num_new = max(workload.num_outputs[first : first + batch_size])
        longest = max(map(len, prompts))
        ids_BT = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
        mask_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
        output_BT = model.generate(
            ids_BT,
            attention_mask=mask_BT,
            do_sample=False,
            min_new_tokens=num_new,  # EOS has probability zero until then
            max_new_tokens=num_new,
            pad_token_id=0,
        )
        if output_BT.shape[1] != longest + num_new:
            raise RuntimeError(f"a static batch gave {output_BT.shape[1] - longest} tokens instead of {num_new}")
        note(f"{min(first + batch_size, len(workload.prompt_ids))}/{len(workload.prompt_ids)} prompts")
    return time.perf_counter() - start_s


class ContinuousBatching:
    """What `generate_batch` drives, driven directly: `generate_batch` takes one length for all prompts, and the useful tokens
    would be fewer. Prefix sharing is off, as it is for every engine here."""

    def __init__(self, model: PreTrainedModel, workload: Workload) -> None:
        hints = WorkloadHints(
            max_prompt_length=max(map(len, workload.prompt_ids)),
            max_generated_length=max(workload.num_outputs),
            num_requests=len(workload.prompt_ids),
        )
        self._manager_cm = model.continuous_batching_context_manager(
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=hints.max_generated_length, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=False),
            workload_hints=hints,
            timeout=10,
        )

    def __enter__(self) -> ContinuousBatching:
        self._manager = self._manager_cm.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager_cm.__exit__(*exception)

    def run(self, workload: Workload, note: Callable[[str], None]) -> float:
        """Seconds until every request has all its tokens. Raises RuntimeError with the reason when it cannot run here."""
        start_s = time.perf_counter()
        wanted = {
            self._manager.add_request(ids, max_new_tokens=num): num
            for ids, num in zip(workload.prompt_ids, workload.num_outputs, strict=True)
        }
        num_prompts, last_s = len(wanted), time.perf_counter()
        while wanted:
            result = self._manager.get_result(timeout=1)
            if result is None:
                fatal = self._manager.background_thread_status.fatal_error
                if fatal is not None or not self._manager.is_running():
                    raise RuntimeError(f"transformers' generation thread ended: {fatal!r}")
                if time.perf_counter() - last_s > _SILENCE_LIMIT_S:
                    raise RuntimeError(f"no request finished for {_SILENCE_LIMIT_S:.0f} s")
                continue
            if result.error is not None:
                raise RuntimeError(f"transformers failed a request: {result.error}")
            if result.is_finished():
                num = wanted.pop(result.request_id)
                if len(result.generated_tokens) != num:
                    raise RuntimeError(f"a request ended with {len(result.generated_tokens)} tokens instead of {num}")
                last_s = time.perf_counter()
                note(f"{num_prompts - len(wanted)}/{num_prompts} prompts")
        return time.perf_counter() - start_s
