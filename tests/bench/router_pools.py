"""Goodput of prefill and decode pools against unified replicas on the same GPUs, simulated.

A request is good when its first token comes within 2 s + 1 ms for each prompt token that no earlier request of the trace had,
and its answer takes at most the TPOT limit for each further token. Goodput is the requests a second at which `--share` are still
good. Speeds of the trace go up by a factor until too few are; in between, the share is taken to fall linearly. Links move 50 GB/s
for each GPU of a replica (400 Gbit/s cards).

    python -m tests.bench.router_pools TRACE OUT.json [--model 8b] [--replicas 8] [--limit N] [--low SPEED]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from router.config import PolicyName, RouterConfig
from router.policy_choice import make_policy
from router.simulator.hardware import DEVICES, MODELS, StepTimer
from router.simulator.outcome import percentiles
from router.simulator.simulation import Simulation, SimulationConfig
from router.simulator.traces import TraceRequest, read_trace

LINK_BYTES_PER_S = 50e9
NUM_DEVICES = {"8b": 1, "70b": 4}
STEP_TOKENS = (2_048, 512)
"""Budgets of a step that unified replicas are tried with: a small one keeps TPOT low too. Decode pools have the last one."""


def run(trace: list[TraceRequest], config: SimulationConfig, timer: StepTimer, policy: PolicyName, limits: list[float]) -> dict[str, Any]:
    """Share of good requests for each TPOT limit, and what explains it."""
    started_s = perf_counter()
    router_config = RouterConfig(
        policy=policy,
        prior_prefill_tokens_per_s=timer.prefill_tokens_per_s,
        prior_transfer_tokens_per_s=config.transfer_bytes_per_s / timer.model.kv_bytes_per_token,
        max_queue_requests=len(trace),
        dispatch_ahead=RouterConfig().dispatch_ahead if policy == "scoring" else None,
    )
    result = Simulation(config, router_config, make_policy(router_config), timer).run(trace)
    outcomes = result.outcomes
    ttft = [outcome.ttft_s is not None and outcome.ttft_s <= outcome.ttft_limit_s for outcome in outcomes]
    tpot = [outcome.tpot_s or 0.0 for outcome in outcomes]
    span_s = trace[-1].arrival_s / config.speedup
    return {
        "num_prefill": config.num_prefill_replicas,
        "speedup": config.speedup,
        "requests_per_s": len(trace) / span_s,
        "good": {str(limit): sum(a and b <= limit for a, b in zip(ttft, tpot, strict=True)) / len(outcomes) for limit in limits},
        "in_ttft": sum(ttft) / len(outcomes),
        "ttft_s": percentiles([outcome.ttft_s or 0.0 for outcome in outcomes]),
        "tpot_s": percentiles(tpot),
        "hit_rate": sum(outcome.num_cached_tokens for outcome in outcomes) / sum(outcome.num_prompt_tokens for outcome in outcomes),
        "plans": dict(result.plans),
        "busy": [round(replica.busy_s / result.end_s, 3) for replica in result.replicas],
        "wall_s": perf_counter() - started_s,
    }


def climb(trace: list[TraceRequest], config: SimulationConfig, timer: StepTimer, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs at growing speeds until fewer than the share are good under the loosest limit."""
    runs = []
    for step in count():
        speedup = options.low * options.factor**step
        runs.append(run(trace, replace(config, speedup=speedup), timer, options.policy, options.limits))
        print(
            json.dumps({name: runs[-1][name] for name in ("num_prefill", "speedup", "good", "in_ttft", "plans", "busy", "wall_s")}),
            flush=True,
        )
        if max(runs[-1]["good"].values()) < options.share or step > 20:
            return runs
    raise AssertionError("unreachable")


def goodput(runs: list[dict[str, Any]], limit: float, share: float) -> float:
    """Requests a second at which exactly the share is good: between the last speed that has it and the first that has not."""
    best = 0.0
    for before, after in zip([None, *runs], runs, strict=False):
        good = after["good"][str(limit)]
        if good < share:
            if before is None or before["good"][str(limit)] < share:
                return best
            part = (before["good"][str(limit)] - share) / (before["good"][str(limit)] - good)
            return float(before["requests_per_s"] + part * (after["requests_per_s"] - before["requests_per_s"]))
        best = after["requests_per_s"]
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path, help="what it knows of other layouts is kept")
    parser.add_argument("--model", choices=NUM_DEVICES, default="8b")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--splits", default="6,5,4", help="sizes of the prefill pool to try")
    parser.add_argument("--only", help="run only layouts whose name contains this")
    parser.add_argument("--policy", default="scoring")
    parser.add_argument("--limit", type=int, default=1_000, help="requests of the trace")
    parser.add_argument("--low", type=float, default=1.0, help="the first speed, in multiples of the trace's")
    parser.add_argument("--factor", type=float, default=1.25, help="between two speeds")
    parser.add_argument("--share", type=float, default=0.9)
    parser.add_argument("--limits", type=lambda text: [float(part) for part in text.split(",")], default=[0.1, 0.03])
    parser.add_argument("--prefill-tokens", type=int, default=4_096, help="budget of a step in the prefill pool")
    options = parser.parse_args()
    num_devices = NUM_DEVICES[options.model]
    timer = StepTimer(MODELS[options.model], DEVICES["h100"], num_devices)
    trace = read_trace(options.trace, 512, options.limit)
    base = SimulationConfig(
        num_replicas=options.replicas, num_blocks=timer.num_blocks(512), transfer_bytes_per_s=num_devices * LINK_BYTES_PER_S
    )
    layouts = {f"unified, {tokens} tokens a step": replace(base, max_num_batched_tokens=tokens) for tokens in STEP_TOKENS}
    pools = replace(base, max_num_batched_tokens=STEP_TOKENS[-1], prefill_max_num_batched_tokens=options.prefill_tokens)
    for num_prefill in map(int, options.splits.split(",")):
        name = f"{num_prefill} prefill, {options.replicas - num_prefill} decode"
        layouts[name] = replace(pools, num_prefill_replicas=num_prefill)
    report: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"runs": {}}
    for name in [name for name in layouts if options.only is None or options.only in name]:
        report["runs"][name] = climb(trace, layouts[name], timer, options)
    report |= {
        "trace": options.trace.name,
        "num_requests": len(trace),
        "model": options.model,
        "num_devices": num_devices * options.replicas,
        "share": options.share,
        "layouts": {name: asdict(config) for name, config in layouts.items()},
        "goodput_per_s": {
            name: {str(limit): goodput(climbed, limit, options.share) for limit in options.limits}
            for name, climbed in report["runs"].items()
        },
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, per_s in report["goodput_per_s"].items():
        print(f"{options.trace.stem} {options.model} {name}: {per_s} good requests/s")


if __name__ == "__main__":
    main()
