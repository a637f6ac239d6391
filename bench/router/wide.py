"""What a router pays for the number of its nodes: `python -m bench.router.wide --json`.

Half of the nodes prefill, half decode. Requests are placed by the code that serves, in groups that
share beginnings of prompts, and each node has some answers at a time. CPU times, the sizes in
turn; of each figure the median of `--rounds` rounds.

    choice_us        CPU of a choice by policy and number of nodes: the views that changed since
                     the one before it, the choice, and the counting of its two nodes
    request_us       CPU of a router of 2 nodes per request, at 128 streams, where requests cost
                     least, on this machine (`bench/router/many_nodes.py`)
    request_growth   by which share of it a request gets dearer from 2 to 1,000 nodes
    digest_ms        reading every node's record and load from a real Redis while all of them work
                     and send heartbeats, and taking it over, by number of nodes
    digest_stall_ms  the longest CPU time of it without a turn of the event loop
    idle_digest_ms   the same of idle nodes, of whose loads only the uptime changes, once a minute
    idle_share       that in a quarter of a lease: the share of a core without requests
    idle_streams     CPU of the open streams to so many idle nodes, which send heartbeats
                     (`bench/router/idle_streams.py` says what each figure is)
    redis_calls      of the router, per request: `lasting` is recorded and removed again, each in a
                     batch of its own, `brief` ends within a quarter of a second
    redis_commands   that Redis ran for them, inside of scripts too
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from bench.command import flags_of, print_figures
from bench.router import many_nodes
from common.ids import AttemptId
from common.nodes import NodeLoad, NodeRecord, Role
from common.observing.clock import MonotonicClock
from node.life.self_description import told_uptime_s
from pdserve.checkpoints.demo_model import demo_model_folder
from pdserve.keys.redis_acl import keyless_acl
from pdserve.local_cluster.embedded_redis import start_embedded_redis
from pdserve.local_cluster.signals import Signals
from placement.redis_store import RedisStore
from placement.store import LiveNode, Placement
from protos.grpc_core import ROUTER_EXPERIMENTS
from router.core.effects import Choose
from router.core.membership import Membership
from router.core.placement import Chooser
from router.core.policies import POLICIES
from router.core.policies.query import Query
from router.dispatch.placement_recorder import PlacementRecorder
from router.watch.router_metrics import RouterMetrics

SIZES = (2, 100, 1000)
NUM_STREAMS = 128
MOST_REQUEST_ROUNDS = 3
LEASE_S = 5.0
UPTIME_S = 2 * 3600.0
NUM_CHOICES = 2000
PROMPT_TOKENS = 1024
NUM_BEGINNINGS = 64
ANSWERS_PER_NODE = 4
NUM_REQUESTS = 64
_CLUSTER = "bench_wide"
_ASKING = {"info", "client", "client|setinfo", "hello", "auth"}
_FIRST_CHOICE = Choose(None, frozenset())


def record(number: int, num_nodes: int) -> NodeRecord:
    """Return the record of one node; the first half of them prefill."""
    return NodeRecord(
        node_id=f"node-{number:04}",
        epoch=1_795_000_000_000_000 + number,
        role=Role.PREFILL if number < num_nodes // 2 else Role.DECODE,
        control_address=f"10.0.{number // 250}.{number % 250 + 1}:5000",
        model="bench",
        fingerprint="f" * 32,
        block_size=64,
        num_blocks=4096,
        max_num_seqs=256,
        max_model_len=32_768,
        metrics_address=f"10.0.{number // 250}.{number % 250 + 1}:5001",
        kv_description="bfloat16, 64 tokens per block, 32 layers of 8 heads of 128",
        version="0.1.0",
        protocol=3,
    )


def load(number: int, uptime_s: float = 0.0, num_drafted: int = 0) -> NodeLoad:
    """Return what a node reports that holds no request."""
    return NodeLoad(
        free_blocks=4096 - number % 7,
        free_seats=256,
        num_running=0,
        num_waiting=0,
        queued_tokens=0,
        num_preemptions=number % 11,
        num_drafted=num_drafted,
        uptime_s=told_uptime_s(uptime_s),
    )


def members(num_nodes: int) -> Membership:
    """Return a membership in which all nodes are heard."""
    found = Membership(model="bench", lease_s=LEASE_S)
    listing = [LiveNode(record=record(n, num_nodes), load=load(n)) for n in range(num_nodes)]
    found.on_listing(listing, 0.0)
    for node in listing:
        found.on_heard(node.record.incarnation)
    return found


class Choices:
    """A router's choosing: places requests and ends the oldest ones."""

    def __init__(self, policy: str, num_nodes: int) -> None:
        self._members = members(num_nodes)
        self._chooser = Chooser(policy, 60.0, secrets.randbits(64))
        self._running: deque[tuple[Any, Any]] = deque()
        self._most_running = ANSWERS_PER_NODE * num_nodes
        self._any = record(0, num_nodes)
        self._num_asked = 0

    def _query(self) -> Query:
        self._num_asked += 1
        first = 10_000 * (self._num_asked % NUM_BEGINNINGS)
        shared = range(first, first + PROMPT_TOKENS // 2)
        own = range(10**6 + 512 * self._num_asked, 10**6 + 512 * (self._num_asked + 1))
        query = Query((*shared, *own), 128)
        query.block_keys(self._any)
        return query

    def choice_us(self) -> float:
        """Return the CPU time of a choice, over `NUM_CHOICES`. Hashing the prompt is not counted:
        it is the same for any number of nodes.

        Raises `RuntimeError` where no pair is chosen.
        """
        queries = [self._query() for _ in range(NUM_CHOICES)]
        began_at_s = time.thread_time()
        for query in queries:
            nodes, now_s = self._members.nodes(), time.monotonic()
            chosen, _ = self._chooser.choose(nodes, query, _FIRST_CHOICE, now_s)
            if chosen.decode is None or chosen.prefill is None:
                raise RuntimeError(f"{chosen.reason}: wanted a pair")
            self._running.append((chosen.decode, chosen.prefill))
            self._members.on_leg_opened(chosen.decode, 0)
            self._members.on_leg_opened(chosen.prefill, PROMPT_TOKENS)
            if len(self._running) > self._most_running:
                decode, prefill = self._running.popleft()
                self._members.on_leg_closed(decode, 0)
                self._members.on_leg_closed(prefill, PROMPT_TOKENS)
        return 1e6 * (time.thread_time() - began_at_s) / NUM_CHOICES


def choice_figures(num_rounds: int, sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the CPU of a choice by policy and size; rounds of all sizes follow each other."""
    figures = {}
    for policy in POLICIES:
        choosers = {size: Choices(policy, size) for size in sizes}
        for size, chooser in choosers.items():
            for _ in range(1 + ANSWERS_PER_NODE * size // NUM_CHOICES):
                chooser.choice_us()
        spans: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(num_rounds):
            for size, chooser in choosers.items():
                spans[size].append(chooser.choice_us())
        figures[policy] = {str(s): round(statistics.median(spans[s]), 1) for s in sizes}
    return figures


def request_us(num_rounds: int) -> float:
    """Return the CPU of a request in all, with its choice between 2 nodes."""
    folder, size = demo_model_folder(), SIZES[0]
    figures = many_nodes.measure((size,), num_rounds, 3.0, NUM_STREAMS, folder)
    found: float = figures["request_us"][str(size)]
    return found


def request_growth(
    choices_us: Mapping[str, Mapping[str, float]], in_all_us: float
) -> dict[str, float]:
    """Return by policy the share of a request by which its choice gets dearer from the first size
    to the last."""
    sizes = str(SIZES[0]), str(SIZES[-1])
    growth_us = {name: of[sizes[1]] - of[sizes[0]] for name, of in choices_us.items()}
    return {name: round(more_us / in_all_us, 3) for name, more_us in growth_us.items()}


@contextmanager
def redis_url() -> Iterator[str]:
    """Run a Redis server of our own."""
    with tempfile.TemporaryDirectory(prefix="bench-wide-") as name, Signals() as signals:
        folder = Path(name)
        redis = start_embedded_redis(
            folder, folder / "redis.log", signals, MonotonicClock(), acl=keyless_acl()
        )
        try:
            yield redis.url
        finally:
            redis.child.kill()


async def _stalls(longest_s: list[float]) -> None:
    """Note the longest CPU time between two turns of the event loop."""
    before_s = time.thread_time()
    while True:
        await asyncio.sleep(0)
        now_s = time.thread_time()
        longest_s[0] = max(longest_s[0], now_s - before_s)
        before_s = now_s


async def _take_over(reader: RedisStore, found: Membership, now_s: float) -> None:
    """Read the registry as `NodePool` does."""
    found.on_listing(await reader.live_nodes(), now_s)
    while found.has_unread:
        found.nodes()
        await asyncio.sleep(0)


async def digest(
    url: str, num_nodes: int, num_rounds: int, *, is_idle: bool
) -> tuple[float, float]:
    """Return the time of one reading of the registry, and its longest stall, in ms.

    Nodes that are not idle draft between two heartbeats. All began at other times.

    Raises `RuntimeError` unless all nodes are read.
    """
    writer, reader = (RedisStore(url, f"{_CLUSTER}_{num_nodes}") for _ in range(2))
    found = members(num_nodes)
    records = [record(n, num_nodes) for n in range(num_nodes)]
    spans, stalls = [], []
    for number in range(2 * num_rounds):
        uptime_s = UPTIME_S + number * LEASE_S / 4
        for n, one in enumerate(records):
            told = load(n, uptime_s + n % 60, num_drafted=0 if is_idle else 100 * number)
            await writer.heartbeat(one, told, lease_s=600.0)
        if number % 2:
            began_at_s = time.thread_time()
            await _take_over(reader, found, float(number))
            spans.append(time.thread_time() - began_at_s)
        else:
            longest_s = [0.0]
            watch = asyncio.create_task(_stalls(longest_s))
            await asyncio.sleep(0)
            await _take_over(reader, found, float(number))
            watch.cancel()
            stalls.append(longest_s[0])
        if len(found.nodes()) != num_nodes:
            raise RuntimeError(f"{len(found.nodes())} nodes were read: wanted {num_nodes}")
    await writer.close()
    await reader.close()
    medians = statistics.median(spans), statistics.median(stalls)
    return round(1e3 * medians[0], 2), round(1e3 * medians[1], 2)


async def _commands(redis: Redis) -> Counter[str]:
    """Return how often Redis ran each command, but for those that ask for this."""
    stats = await redis.info("commandstats")
    counts = {name.removeprefix("cmdstat_"): int(one["calls"]) for name, one in stats.items()}
    return Counter({name: calls for name, calls in counts.items() if name not in _ASKING})


async def _counted(url: str, work: Callable[[], Awaitable[None]]) -> tuple[int, int]:
    """Return how many calls, and how many commands in all, Redis got from `work`."""
    redis = Redis.from_url(url)
    before = await _commands(redis)
    await work()
    counts = await _commands(redis) - before
    await redis.aclose()
    return counts["evalsha"] + counts["eval"], counts.total()


async def redis_per_request(url: str) -> dict[str, dict[str, float]]:
    """Return calls and commands of Redis per request, for those that last and those that do not."""
    store = RedisStore(url, _CLUSTER)
    metrics = RouterMetrics(CollectorRegistry())
    recorder = PlacementRecorder(store, "router-0", MonotonicClock(), metrics)
    running = asyncio.create_task(recorder.run())
    await store.live_nodes()

    async def lasting() -> None:
        for number in range(NUM_REQUESTS // 8):
            recorder.place_nowait(_placement(number))
            await recorder.wait_idle()
            recorder.unplace_nowait(AttemptId(f"choice-{number:024}", 1))
            await recorder.wait_idle()

    async def together() -> None:
        for number in range(NUM_REQUESTS):
            recorder.place_nowait(_placement(number))
        await recorder.wait_idle()
        for number in range(NUM_REQUESTS):
            recorder.unplace_nowait(AttemptId(f"choice-{number:024}", 1))
        await recorder.wait_idle()

    async def brief() -> None:
        for number in range(NUM_REQUESTS):
            recorder.place_nowait(_placement(number))
            recorder.unplace_nowait(AttemptId(f"choice-{number:024}", 1))
        await recorder.wait_idle()

    calls, commands = {}, {}
    loads = {
        "lasting": (lasting, NUM_REQUESTS // 8),
        "together": (together, NUM_REQUESTS),
        "brief": (brief, NUM_REQUESTS),
    }
    for name, (work, num_requests) in loads.items():
        num_calls, num_commands = await _counted(url, work)
        calls[name] = round(num_calls / num_requests, 3)
        commands[name] = round(num_commands / num_requests, 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await store.close()
    return {"redis_calls": calls, "redis_commands": commands}


def _placement(number: int) -> Placement:
    nodes = record(0, 2).incarnation, record(1, 2).incarnation
    return Placement(
        attempt=AttemptId(f"choice-{number:024}", 1),
        router_id="router-0",
        decode=nodes[1],
        prefill=nodes[0],
        reason="prefix_affinity: best of 12, 3 requests there",
    )


async def _with_redis(num_rounds: int, sizes: Sequence[int]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with redis_url() as url:
        digests = {str(s): await digest(url, s, num_rounds, is_idle=False) for s in sizes}
        figures["digest_ms"] = {size: span_ms for size, (span_ms, _) in digests.items()}
        figures["digest_stall_ms"] = {size: stall_ms for size, (_, stall_ms) in digests.items()}
        idles = {str(s): await digest(url, s, num_rounds, is_idle=True) for s in sizes}
        figures["idle_digest_ms"] = {size: span_ms for size, (span_ms, _) in idles.items()}
        idle = {size: ms / (1e3 * LEASE_S / 4) for size, ms in figures["idle_digest_ms"].items()}
        figures["idle_share"] = {size: round(share, 4) for size, share in idle.items()}
        return figures | await redis_per_request(url)


def idle_streams(num_nodes: int, span_s: float = 8.0) -> dict[str, float]:
    """Return what open streams to so many idle nodes cost, in a process like a router's."""
    command = [sys.executable, "-m", "bench.router.idle_streams", "--nodes", f"{num_nodes}"]
    measured = subprocess.run(
        [*command, "--seconds", f"{span_s}"],
        env={**os.environ, "GRPC_EXPERIMENTS": ROUTER_EXPERIMENTS},
        stdout=subprocess.PIPE,
        check=True,
    )
    figures: dict[str, float] = json.loads(measured.stdout)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    parser = flags_of("bench.router.wide", __doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each figure")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("wanted at least 1 round")
    choices = choice_figures(options.rounds, SIZES)
    in_all_us = request_us(min(options.rounds, MOST_REQUEST_ROUNDS))
    figures: dict[str, Any] = {
        "choice_us": choices,
        "request_us": in_all_us,
        "request_growth": request_growth(choices, in_all_us),
        **asyncio.run(_with_redis(options.rounds, SIZES)),
        "idle_streams": {str(size): idle_streams(size) for size in SIZES},
    }
    print_figures(figures, is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
