"""Serves Ray Serve LLM on vLLM-CPU until standard input closes. Runs in the environment of that peer, not in ours.

Usage: python ray_serve_llm.py MODEL_DIR NAME PORT DTYPE. Prints "ready" once the model answers.
"""

from __future__ import annotations

import sys

import ray
from ray import serve
from ray.serve.llm import LLMConfig, LLMServingArgs, build_openai_app


def main() -> None:
    model, name, port, dtype = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=256 * 2**20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        config = LLMConfig(
            model_loading_config={"model_id": name, "model_source": model},
            engine_kwargs={"dtype": dtype, "max_model_len": 2048, "max_num_seqs": 64, "enable_prefix_caching": False},
            placement_group_config={"bundles": [{"CPU": 1}]},
            deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
        )
        serve.run(build_openai_app(LLMServingArgs(llm_configs=[config])), name="peer", route_prefix="/")
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
