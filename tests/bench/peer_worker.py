"""A peer's engine that computes prompts of token ids on request: `PEER_PYTHON peer_worker.py vllm_cpu|openvino MODEL [DTYPE]`.

Runs in the peer's own environment, so it imports nothing of this repository. It speaks as the worker of paired.py does: "ready", then for
each line of JSON with `prompts` and `max_tokens` the seconds that its greedy answers took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], None]


def vllm_cpu(folder: str, dtype: str) -> Generate:
    import vllm

    engine = vllm.LLM(model=folder, dtype=dtype, enable_prefix_caching=False, max_model_len=4096, disable_log_stats=True)

    def generate(prompts: list[list[int]], max_tokens: int) -> None:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return generate


def openvino(gguf: str) -> Generate:
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 2, 64, False
    pipe = genai.ContinuousBatchingPipeline(gguf, scheduler, "CPU")

    def generate(prompts: list[list[int]], max_tokens: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos, config.do_sample = True, False
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        pipe.generate(tensors, [config] * len(prompts))

    return generate


def main() -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # engines print what they like
        generate = {"vllm_cpu": vllm_cpu, "openvino": openvino}[sys.argv[1]](*sys.argv[2:])
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            task = json.loads(line)
            start_s = time.perf_counter()
            generate(task["prompts"], task["max_tokens"])
            print(time.perf_counter() - start_s, file=answers, flush=True)


if __name__ == "__main__":
    main()
