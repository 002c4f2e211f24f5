"""Measures hit rate and balance of every policy on a Mooncake trace, with 5,000 and 20,000 blocks of 512 tokens on each of 4 replicas.

Requests have no deadline and none is assumed, as in the references: with deadlines (`--deadlines`) the router gives up a cached prefix
where the first token would be late.

    python -m tests.bench.router_cells TRACE OUT_STEM
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from router.config import PolicyName, RouterConfig
from router.simulator.comparison import run_policy
from router.simulator.hardware import DEVICES, MODELS, StepTimer
from router.simulator.pictures import draw_comparison
from router.simulator.simulation import SimulationConfig
from router.simulator.traces import read_trace

POLICIES: tuple[PolicyName, ...] = ("scoring", "longest_prefix", "consistent_hash", "round_robin", "least_loaded", "power_of_two")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-output-tokens", type=int, help="shorten answers: hit rates hardly change, and runs take a fifth")
    parser.add_argument("--deadlines", action="store_true", help="requests carry their TTFT limit as a deadline")
    parser.add_argument("--policies", default=",".join(POLICIES))
    options = parser.parse_args()
    chosen = options.policies.split(",")
    results = options.out.with_suffix(".json")
    known = json.loads(results.read_text())["runs"] if results.exists() else []
    kept = {(run["num_blocks"], run["policy"]): run for run in known if run["policy"] not in chosen}
    trace = read_trace(options.trace, 512, options.limit)
    if options.max_output_tokens:
        trace = [replace(asked, num_output_tokens=min(options.max_output_tokens, asked.num_output_tokens)) for asked in trace]
    timer = StepTimer(MODELS["8b"], DEVICES["h100"])
    config = SimulationConfig(has_deadlines=options.deadlines)
    base = RouterConfig(
        prior_prefill_tokens_per_s=timer.prefill_tokens_per_s,
        max_queue_requests=len(trace),
        default_ttft_slo_s=RouterConfig().default_ttft_slo_s if options.deadlines else 86_400.0,
    )
    runs: list[dict[str, object]] = []
    for num_blocks in (5_000, 20_000):
        cell: list[dict[str, object]] = [kept[num_blocks, policy] for policy in POLICIES if (num_blocks, policy) in kept]
        for policy in (policy for policy in POLICIES if policy in chosen):
            run = {"num_blocks": num_blocks, **run_policy(policy, trace, replace(config, num_blocks=num_blocks), timer, base)}
            cell.append(run)
            print(
                f"{options.trace.stem} {num_blocks} {policy:16} hit rate {run['hit_rate']:.4f} busiest {run['busiest_to_mean_work']:.3f} "
                f"in SLO {run['goodput_share']:.3f} TTFT {run['ttft_s']}",
                flush=True,
            )
        cell.sort(key=lambda run: [*POLICIES].index(run["policy"]))  # type: ignore[arg-type]
        runs += cell
        report = {
            "trace": options.trace.name,
            "num_requests": len(trace),
            "max_output_tokens": options.max_output_tokens,
            "config": asdict(config),
            "runs": runs,
        }
        results.write_text(json.dumps(report, indent=1) + "\n")
        title = f"{options.trace.stem}, 4 replicas of Llama-3.1-8B on H100 (simulated), {num_blocks} blocks of 512 tokens each"
        draw_comparison(cell, title, options.out.with_name(f"{options.out.name}_{num_blocks}_blocks.png"))


if __name__ == "__main__":
    main()
