"""Simulates the goodput of prefill and decode pools against unified replicas on the same GPUs.

A request is good when its first token comes within 2 s + 1 ms for each prompt token that no earlier request of the trace had,
and its answer takes at most the TPOT limit for each further token. Goodput is the number of good requests over the time until all have
ended, at the best of several speeds of the trace, from below to above the GPUs' capacity. Links move 50 GB/s per GPU of a replica
(400 Gbit/s cards).

    python -m tests.bench.router_pools TRACE OUT.json [--model 8b] [--replicas 8] [--limit N] [--speeds 3,4,5]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from router.config import PolicyName, RouterConfig
from router.policies.policy_choice import make_policy
from router.simulator.hardware import DEVICES, MODELS, StepTimer
from router.simulator.outcome import percentiles
from router.simulator.simulation import Simulation, SimulationConfig
from router.simulator.traces import TraceRequest, read_trace

LINK_BYTES_PER_S = 50e9
NUM_DEVICES = {"8b": 1, "70b": 4}
STEP_TOKENS = (2_048, 512, 256)
"""Budgets of a step that unified replicas are tried with: a small one keeps TPOT low too. Decode pools have 512."""


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
    num_good = {str(limit): sum(a and b <= limit for a, b in zip(ttft, tpot, strict=True)) for limit in limits}
    return {
        "num_prefill": config.num_prefill_replicas,
        "speedup": config.speedup,
        "requests_per_s": len(trace) / trace[-1].arrival_s * config.speedup,
        "good": {limit: count / len(outcomes) for limit, count in num_good.items()},
        "goodput_per_s": {limit: count / result.end_s for limit, count in num_good.items()},
        "in_ttft": sum(ttft) / len(outcomes),
        "ttft_s": percentiles([outcome.ttft_s or 0.0 for outcome in outcomes]),
        "tpot_s": percentiles(tpot),
        "hit_rate": sum(outcome.num_cached_tokens for outcome in outcomes) / sum(outcome.num_prompt_tokens for outcome in outcomes),
        "plans": dict(result.plans),
        "busy": [round(replica.busy_s / result.end_s, 3) for replica in result.replicas],
        "wall_s": perf_counter() - started_s,
    }


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


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
    parser.add_argument("--speeds", type=_numbers, default=[1.0], help="in multiples of the trace's")
    parser.add_argument("--limits", type=_numbers, default=[0.1, 0.03], help="of TPOT, in seconds")
    parser.add_argument("--prefill-tokens", type=int, default=4_096, help="budget of a step in the prefill pool")
    options = parser.parse_args()
    num_devices = NUM_DEVICES[options.model]
    timer = StepTimer(MODELS[options.model], DEVICES["h100"], num_devices)
    trace = read_trace(options.trace, 512, options.limit)
    base = SimulationConfig(
        num_replicas=options.replicas, num_blocks=timer.num_blocks(512), transfer_bytes_per_s=num_devices * LINK_BYTES_PER_S
    )
    layouts = {f"unified, {tokens} tokens a step": replace(base, max_num_batched_tokens=tokens) for tokens in STEP_TOKENS}
    pools = replace(base, max_num_batched_tokens=512, prefill_max_num_batched_tokens=options.prefill_tokens)
    for num_prefill in map(int, options.splits.split(",")):
        name = f"{num_prefill} prefill, {options.replicas - num_prefill} decode"
        layouts[name] = replace(pools, num_prefill_replicas=num_prefill)
    report: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"runs": {}}
    for name in [name for name in layouts if options.only is None or options.only in name]:
        report["runs"][name] = []
        for speedup in options.speeds:
            figures = run(trace, replace(layouts[name], speedup=speedup), timer, options.policy, options.limits)
            report["runs"][name].append(figures)
            print(name, {key: figures[key] for key in ("speedup", "good", "goodput_per_s", "plans", "busy", "wall_s")}, flush=True)
    report |= {
        "trace": options.trace.name,
        "num_requests": len(trace),
        "model": options.model,
        "num_devices": num_devices * options.replicas,
        "layouts": {name: asdict(config) for name, config in layouts.items()},
        "goodput_per_s": {
            name: {limit: max(figures["goodput_per_s"][limit] for figures in runs) for limit in map(str, options.limits)}
            for name, runs in report["runs"].items()
        },
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, per_s in report["goodput_per_s"].items():
        print(f"{options.trace.stem} {options.model} {name}: {per_s} good requests/s")


if __name__ == "__main__":
    main()
