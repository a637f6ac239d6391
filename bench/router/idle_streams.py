"""What open streams to idle nodes cost a router.

    python -m bench.router.idle_streams --nodes 1000

The clients of a router, on its event loop and ticked as `NodePool` ticks them, and another process
that keeps the other ends of all their streams with the code of a node: heartbeats and repeated
numbers over loopback.
With `--used` the router has requests on all of them, and so asks more often, and pings them.
`python -m bench.router.wide` runs it with the environment of a router.

    share       the share of a core
    beats       heartbeats of a node in a second
    beat_us     CPU of a heartbeat, with all that comes with it: numbers, ticks, pings
    suspected   suspicions; with more than none, the other process did not keep up
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace

import uvloop

from bench.router.idle_nodes import IdleService, serve_idle_nodes
from bench.router.wide import record
from common.ids import Incarnation
from common.observing.clock import MonotonicClock
from protos import pdserve_node_pb2 as pb
from router.core.known.block_reports import BlockReport
from router.dispatch.client.node_clients import NodeClient
from router.dispatch.liveness.pace import WIDE_NODES
from router.dispatch.liveness.silence import TICK_S
from router.dispatch.node_pool import tick_all

WARM_UP_S = 10.0
"""A wait that ends when all nodes are idle."""
_OPENED_AT_ONCE = 20
_ROUTER = Incarnation("router-0", 1)


async def _serve() -> None:
    """Print the port, and serve until killed."""
    server, port = await serve_idle_nodes(IdleService())
    print(port, flush=True)
    await server.wait_for_termination()


class _Heard:
    """Counts what the clients tell: a `NodeListener`."""

    num_running = 0

    def __init__(self) -> None:
        self.num_beats = self.num_suspected = 0
        self.lost: list[str] = []

    def on_heard(self, node: Incarnation, stuck_s: float, *, is_reached: bool) -> None:
        """Count a heartbeat."""
        self.num_beats += 1

    def on_blocks(self, node: Incarnation, report: BlockReport) -> None:
        """Take blocks: there are none."""

    def on_for_others(self, node: Incarnation, message: pb.NodeMessage) -> None:
        """Ignore messages for other nodes: there are none."""

    def on_suspected(self, node: Incarnation, reason: str, *, is_heard: bool) -> None:
        """Count a suspicion."""
        self.num_suspected += 1

    def on_lost(self, node: Incarnation, reason: str) -> None:
        """Keep the reason."""
        self.lost.append(reason)


async def measure(num_nodes: int, port: int, span_s: float, *, is_used: bool) -> dict[str, float]:
    """Return the figures. Raises `RuntimeError` where a stream was lost."""
    heard = _Heard()
    clients: dict[Incarnation, NodeClient] = {}
    address = f"127.0.0.1:{port}"

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            used = clients.keys() if is_used else frozenset()
            tick_all(clients, used, frozenset(), is_alarm=False)

    for number in range(num_nodes):
        node = replace(record(number, num_nodes), control_address=address)
        client = NodeClient(node, _ROUTER, heard, lambda *_: None, clock=MonotonicClock())
        clients[node.incarnation] = client
        client.start()
        if number % _OPENED_AT_ONCE == 0:
            await asyncio.sleep(0.05)
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(WARM_UP_S if num_nodes >= WIDE_NODES else 1.0)
    num_before, num_suspected = heard.num_beats, heard.num_suspected
    began_at_s, cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(span_s)
    cpu_s, passed_s = time.process_time() - cpu_s, time.monotonic() - began_at_s
    num_beats, num_suspected = heard.num_beats - num_before, heard.num_suspected - num_suspected
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)
    if heard.lost or not num_beats:
        raise RuntimeError(
            f"{len(heard.lost)} streams lost, {num_beats} heartbeats: {heard.lost[:1]}"
        )
    await asyncio.gather(*(client.close() for client in clients.values()))
    return {
        "share": round(cpu_s / passed_s, 4),
        "beats": round(num_beats / num_nodes / passed_s, 2),
        "beat_us": round(1e6 * cpu_s / num_beats, 1),
        "suspected": num_suspected,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.router.idle_streams", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--nodes", type=int, default=1000, help="how many")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long to measure")
    parser.add_argument("--used", action="store_true", help="each node has a request")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        asyncio.run(_serve())
    command = [sys.executable, "-m", "bench.router.idle_streams", "--serve"]
    nodes = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert nodes.stdout is not None
        port = int(nodes.stdout.readline())
        work = measure(options.nodes, port, options.seconds, is_used=options.used)
        print(json.dumps(uvloop.run(work)))
    finally:
        nodes.kill()
        nodes.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
