"""Measures the goodput of every policy at 0.6, 0.9 and 1.2 of saturation.

Saturation is the largest speed-up of the trace at which the policy `longest_prefix` still keeps up: all requests end within 1.05 times
the span of arrivals; found by bisection on a logarithmic scale. The TTFT limit is 2 s + 1 ms for each prompt token that no earlier
request of the trace had (the same for every policy), the TPOT limit 100 ms.

    python -m tests.bench.router_goodput TRACE OUT_STEM [--limit N] [--blocks N] [--policies ...] [--loads ...]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from router.config import PolicyName, RouterConfig
from router.simulator.comparison import POLICIES, find_saturation, run_policy
from router.simulator.hardware import DEVICES, MODELS, StepTimer
from router.simulator.pictures import draw_goodput
from router.simulator.simulation import SimulationConfig
from router.simulator.traces import read_trace

LOADS = (0.6, 0.9, 1.2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--blocks", type=int, default=5_000)
    parser.add_argument("--saturation", type=float, help="skip the search")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--loads", default=",".join(map(str, LOADS)))
    options = parser.parse_args()
    policies: list[PolicyName] = [policy for policy in POLICIES if policy in options.policies.split(",")]
    loads = [float(load) for load in options.loads.split(",")]
    trace = read_trace(options.trace, 512, options.limit)
    timer = StepTimer(MODELS["8b"], DEVICES["h100"])
    config = SimulationConfig(num_blocks=options.blocks)
    base = RouterConfig(prior_prefill_tokens_per_s=timer.prefill_tokens_per_s, max_queue_requests=len(trace))
    saturation = options.saturation or find_saturation("longest_prefix", trace, config, timer, low=2.0, high=4.0, num_rounds=4)
    print(f"saturation at {saturation:.2f} times the trace's speed", flush=True)
    runs = []
    for load in loads:
        for policy in policies:
            run = run_policy(policy, trace, replace(config, speedup=load * saturation), timer, base)
            runs.append({"load": load, **run})
            print(
                f"load {load} {policy:16} in SLO {run['goodput_share']:.3f} (own uncached {run['goodput_share_by_own_uncached']:.3f}) "
                f"rejected {run['num_rejected']} hit rate {run['hit_rate']:.3f} busy {run['busy_share']:.2f}",
                flush=True,
            )
    report = {"trace": options.trace.name, "num_requests": len(trace), "saturation": saturation, "config": asdict(config), "runs": runs}
    options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    shares = {policy: [float(str(run["goodput_share"])) for run in runs if run["policy"] == policy] for policy in policies}
    title = f"{options.trace.stem}, 4 replicas of Llama-3.1-8B on H100 (simulated), {options.blocks} blocks each"
    draw_goodput(loads, shares, title, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
