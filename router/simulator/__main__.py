"""`python -m router.simulator`: replays a trace and writes the results."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from tqdm import tqdm

from router.config import RouterConfig
from router.simulator.comparison import POLICIES, run_policy
from router.simulator.hardware import DEVICES, MODELS, StepTimer
from router.simulator.pictures import draw_comparison
from router.simulator.simulation import SimulationConfig
from router.simulator.traces import TraceRequest, read_trace

logger = logging.getLogger("router.simulator")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status; user errors are one line on stderr."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        _simulate(options)
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m router.simulator", description="Replays a trace through the live router's objects.")
    parser.add_argument("--trace", type=Path, required=True, help="a Mooncake .jsonl or an Azure .csv file")
    parser.add_argument("--policy", choices=POLICIES, default="scoring")
    parser.add_argument("--compare", action="store_true", help="run every policy, print a table and draw it")
    parser.add_argument("--mode", choices=("unified", "disaggregated"), default="unified")
    parser.add_argument("--replicas", type=int, default=4, help="replicas of a unified model")
    parser.add_argument("--prefill", type=int, default=2, help="replicas of the prefill pool of a disaggregated model")
    parser.add_argument("--decode", type=int, default=2, help="replicas of its decode pool")
    parser.add_argument("--bandwidth", type=float, default=50e9, help="bytes/s from one prefill replica to one decode replica")
    parser.add_argument("--prefill-max-num-batched-tokens", type=int, help="token budget of a prefill replica; default: as elsewhere")
    parser.add_argument("--blocks-per-replica", type=int, help="KV blocks per replica; default: as many as fit the device")
    parser.add_argument("--block-size", type=int, default=512, help="tokens per block; must divide 512")
    parser.add_argument("--speedup", type=float, default=1.0, help="factor by which arrivals are faster than in the trace")
    parser.add_argument("--limit", type=int, help="replay only this many requests")
    parser.add_argument("--tenants", type=int, default=1, help="number of tenants that requests are dealt out to in turn")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--device", choices=DEVICES, default="h100")
    parser.add_argument("--devices-per-replica", type=int, help="default: as few as hold the weights in half of their memory")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2_048)
    parser.add_argument("--max-num-mixed-tokens", type=int, help="token budget of a step in which requests decode; default: as of others")
    parser.add_argument(
        "--max-urgent-share",
        type=float,
        default=SimulationConfig().max_urgent_share,
        help="largest share of the work for which decodes step aside for more urgent prompts; 0: never",
    )
    parser.add_argument("--draft-acceptance", type=float, nargs="+", default=(), help="chances of drafts by depth, e.g. 0.7 0.6 0.5")
    parser.add_argument("--max-drafts", type=int, default=8, help="most drafts of a request in one step")
    parser.add_argument("--max-wait", type=float, help="reject requests with a longer predicted wait, in seconds")
    parser.add_argument("--no-deadlines", action="store_true", help="requests do not carry their TTFT limit as a deadline")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="with --compare: write the chart here (PNG)")
    return parser


def _simulate(options: argparse.Namespace) -> None:
    for name in ("replicas", "prefill", "decode", "tenants", "max_num_seqs", "max_num_batched_tokens", "block_size"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    for name in ("speedup", "bandwidth"):
        if getattr(options, name) <= 0:
            raise ValueError(f"--{name} must be above 0, got {getattr(options, name)}")
    has_pools = options.mode == "disaggregated"
    num_replicas = options.prefill + options.decode if has_pools else options.replicas
    model, device = MODELS[options.model], DEVICES[options.device]
    num_devices = options.devices_per_replica or max(1, round(2 * model.weight_bytes / device.memory_bytes + 0.49))
    timer = StepTimer(model, device, num_devices)
    trace = read_trace(options.trace, options.block_size, options.limit)
    if options.tenants > 1:
        trace = [replace(request, tenant=f"tenant {number % options.tenants}") for number, request in enumerate(trace)]
    config = SimulationConfig(
        num_replicas=num_replicas,
        num_prefill_replicas=options.prefill if has_pools else 0,
        transfer_bytes_per_s=options.bandwidth,
        prefill_max_num_batched_tokens=options.prefill_max_num_batched_tokens,
        num_blocks=options.blocks_per_replica or timer.num_blocks(options.block_size),
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_mixed_tokens=options.max_num_mixed_tokens,
        max_urgent_share=options.max_urgent_share,
        draft_acceptance=tuple(options.draft_acceptance),
        max_drafts=options.max_drafts,
        speedup=options.speedup,
        has_deadlines=not options.no_deadlines,
        seed=options.seed,
    )
    base = RouterConfig(
        seed=options.seed,
        max_wait_s=options.max_wait,
        prior_prefill_tokens_per_s=timer.prefill_tokens_per_s,
        prior_transfer_tokens_per_s=options.bandwidth / model.kv_bytes_per_token,
        max_queue_requests=max(RouterConfig().max_queue_requests, len(trace)),
    )
    runs = [_timed_run(policy, trace, config, timer, base) for policy in (POLICIES if options.compare else (options.policy,))]
    report = {
        "trace": options.trace.name,
        "model": model.name,
        "device": device.name,
        "devices_per_replica": num_devices,
        "config": asdict(config),
        "runs": runs,
    }
    sys.stdout.write(_table(runs))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.compare:
        picture = options.picture or Path(f"comparison_{options.trace.stem}.png")
        pools = f" ({options.prefill} prefill, {options.decode} decode)" if has_pools else ""
        where = f"{num_replicas} replicas{pools} of {model.name} on {num_devices} {device.name}"
        title = f"{options.trace.stem}, {where}, speed-up {options.speedup:g}"
        draw_comparison(runs, title, picture)
        logger.info("drew %s", picture)


def _timed_run(policy: Any, trace: list[TraceRequest], config: SimulationConfig, timer: StepTimer, base: RouterConfig) -> dict[str, Any]:
    started_s = perf_counter()
    with tqdm(total=len(trace), desc=policy, unit="requests") as bar:
        run: dict[str, Any] = run_policy(policy, trace, config, timer, base, _updater(bar))
        bar.update(len(trace) - bar.n)
    run["wall"]["simulation_s"] = perf_counter() - started_s
    return run


def _updater(bar: Any) -> Callable[[int], None]:
    def update(num_ended: int) -> None:
        bar.update(num_ended - bar.n)

    return update


def _table(runs: list[dict[str, Any]]) -> str:
    header = f"{'policy':16} {'hit rate':>8} {'in SLO':>7} {'rejected':>8} {'busiest':>8} {'TTFT p50':>9} {'p99':>8} "
    header += f"{'TPOT p50':>9} {'p99':>7} {'decision':>9}"
    lines = [header]
    for run in runs:
        ttft, tpot, decision = run["ttft_s"], run["tpot_s"], run["wall"]["decision_s"]
        lines.append(
            f"{run['policy']:16} {run['hit_rate']:8.3f} {run['goodput_share']:7.3f} {run['num_rejected']:8d} "
            f"{run['busiest_to_mean_work']:8.3f} {ttft.get('p50', 0):8.3f}s {ttft.get('p99', 0):7.2f}s "
            f"{tpot.get('p50', 0):8.3f}s {tpot.get('p99', 0):6.3f}s {1e6 * decision.get('p50', 0):7.0f}us"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
