"""A cluster on a virtual clock serves a trace: `python -m bench.plan --json`.

The nodes are those of `simulator/`: the code that serves, with step times of a profile. Without
`--trace` a generated trace of conversations is served, with `--requests` requests.

conversation_s           seconds of one core that the simulation took
simulated_s              seconds of the virtual clock, from the first arrival to the last token
simulated_s_per_s        their ratio
steps, runs, events      steps of all nodes; those that were planned; events of the clock
hit_rate                 share of the prompts' tokens that no node computed
pool_hit_rate            the same, in one pool as large as all nodes' pools together
prefill_pool_hit_rate    the same, in one as large as the pools of nodes that prefill: what decode
                         nodes cache are mostly copies of it
all_hit_rate             the same, in one as large as all pools and the nodes' host memory
sim.hit_share_of_pool    hit_rate / pool_hit_rate
reported_blocks          those that entered or left a tier of a node, as it reports them to a router
report_bytes_per_s       the bytes of these reports, of all nodes together, in a simulated second
ttft_s, tpot_s, gap_s    p50 and p99: `common/observing/latency.py`; the longest gap of each request
goodput_rps              requests a second within `--ttft` and `--tpot`

Then `--many` short requests go to 1,000 nodes (`bench/plan/many.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.plan.many import NUM_NODES, serve_many
from common.errors import ConfigError
from common.kv.blocks import KEY_BYTES
from common.long_lived import exclude_from_collection
from common.nodes import Role
from common.observing.latency import LatencyTargets
from common.settings.config import Config, EngineConfig
from simulator.clients import client_requests
from simulator.cluster import ClusterSetup, SimulatedCluster
from simulator.generated_trace import generated_trace
from simulator.node import SimulatedNode
from simulator.profile import FOLDER, read_profile
from simulator.served import latency_figures
from simulator.shared_pool import num_found_tokens
from simulator.trace_file import TraceRequest, read_trace

RATE = 3.4
"""Requests a second of a generated trace: what 16 nodes serve."""
GENERATED = 12_000
REPORT_BYTES = 11
"""What a report takes in a message besides the keys of its blocks."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    flags = argparse.ArgumentParser(
        prog="python -m bench.plan", description="Serve a trace on a simulated cluster."
    )
    flags.add_argument("--trace", type=Path, help="an Azure or Mooncake trace (default: made up)")
    flags.add_argument("--requests", type=int, help="of the trace, from its start (default: all)")
    flags.add_argument(
        "--rate", type=float, default=RATE, help=f"of a made-up trace, a second (default: {RATE})"
    )
    flags.add_argument("--prefill", type=int, default=8, help="prefill nodes")
    flags.add_argument("--decode", type=int, default=8, help="decode nodes")
    flags.add_argument("--mixed", type=int, default=0, help="mixed nodes")
    flags.add_argument(
        "--host-memory", type=int, default=0, help="GiB of a node, for prefixes (default: none)"
    )
    flags.add_argument("--profile", type=Path, default=FOLDER / "8b_h100.json")
    flags.add_argument("--ttft", type=float, default=2.0, help="target in seconds")
    flags.add_argument("--tpot", type=float, default=0.05, help="target in seconds")
    flags.add_argument(
        "--many", type=int, default=10_000, help="short requests to 1,000 nodes (0: none)"
    )
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--json", action="store_true", help="print one JSON line last")
    return flags


def _nodes(arguments: argparse.Namespace) -> dict[Role, int]:
    nodes = {
        role: getattr(arguments, role.value) for role in (Role.PREFILL, Role.DECODE, Role.MIXED)
    }
    for role, number in nodes.items():
        if number < 0:
            raise ConfigError(f"--{role.value} is {number}: wanted 0 or more")
    if not nodes[Role.DECODE] + nodes[Role.MIXED]:
        raise ConfigError("there is no node that decodes: wanted --decode or --mixed")
    return nodes


def _requests(arguments: argparse.Namespace) -> list[TraceRequest]:
    most = arguments.requests
    if most is not None and most < 1:
        raise ConfigError(f"--requests is {most}: wanted at least 1")
    if arguments.trace is not None:
        return read_trace(arguments.trace, most)
    if not 0 < arguments.rate < float("inf"):
        raise ConfigError(f"--rate is {arguments.rate:g}: wanted above 0")
    return generated_trace(most or GENERATED, arguments.rate, arguments.seed)


def _setup(arguments: argparse.Namespace) -> ClusterSetup:
    nodes = _nodes(arguments)
    if arguments.host_memory < 0:
        raise ConfigError(f"--host-memory is {arguments.host_memory}: wanted 0 or more")
    engine = EngineConfig(prefix_host_memory=arguments.host_memory << 30)
    return ClusterSetup(
        profile=read_profile(arguments.profile),
        num_nodes=nodes,
        config=Config(role=Role.DECODE, engine=engine),
        seed=arguments.seed,
    )


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Serve the trace; return the content of the JSON line. Raises `ConfigError`."""
    requests, setup = _requests(arguments), _setup(arguments)
    targets = LatencyTargets(ttft_s=arguments.ttft, tpot_s=arguments.tpot)
    began_s = time.process_time()
    cluster = SimulatedCluster(setup)
    clients = client_requests(requests, max_model_len=cluster.max_model_len, seed=arguments.seed)
    served = cluster.run(clients)
    took_s = time.process_time() - began_s
    simulated_s = max((one.last_at_s for one in served), default=0.0)
    counters = [node.scheduler.statistics().counters for node in cluster.nodes]
    num_prompt = sum(client.trace.num_prompt for client in clients)
    num_computed = sum(one.num_chunk_tokens - one.num_recomputed_tokens for one in counters)
    block_size = setup.config.engine.block_size

    def found_in_one_pool(pooled: Sequence[SimulatedNode], *, has_host: bool = False) -> int:
        num_blocks = sum(
            node.scheduler.pool.num_blocks + has_host * node.scheduler.host_pool.num_blocks
            for node in pooled
        )
        traces = (client.trace for client in clients)
        return num_found_tokens(traces, num_blocks * block_size, block_size)

    router = cluster.router
    report_bytes = KEY_BYTES * router.num_reported_blocks + REPORT_BYTES * router.num_reports
    found = found_in_one_pool(cluster.nodes)
    prefilling = [node for node in cluster.nodes if cluster.role_of(node.me) is Role.PREFILL]
    found_by_prefilling = found_in_one_pool(prefilling or cluster.nodes)
    return {
        "conversation_s": round(took_s, 2),
        "simulated_s": round(simulated_s, 3),
        "simulated_s_per_s": round(simulated_s / took_s, 2),
        "refused": len(requests) - len(clients),
        "nodes": {role.value: number for role, number in setup.num_nodes.items()},
        "steps": sum(one.num_steps for one in counters),
        "runs": sum(node.execution.num_runs for node in cluster.nodes),
        "events": cluster.timeline.num_handled,
        "preemptions": sum(one.num_preemptions for one in counters),
        "hit_rate": round(1 - num_computed / num_prompt, 4),
        "pool_hit_rate": round(found / num_prompt, 4),
        "prefill_pool_hit_rate": round(found_by_prefilling / num_prompt, 4),
        "all_hit_rate": round(found_in_one_pool(cluster.nodes, has_host=True) / num_prompt, 4),
        "sim.hit_share_of_pool": round((num_prompt - num_computed) / found, 4) if found else 1.0,
        "reported_blocks": router.num_reported_blocks,
        "report_bytes_per_s": round(report_bytes / simulated_s) if served else 0,
        **latency_figures(served, targets, simulated_s),
    }


def main() -> None:
    arguments = parser().parse_args()
    try:
        exclude_from_collection()
        result = run(arguments)
        if arguments.many > 1:
            result |= serve_many(arguments.profile, arguments.many, NUM_NODES, arguments.seed)
    except ConfigError as error:
        sys.exit(str(error))
    for name, value in result.items():
        print(f"{name:24} {value}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
