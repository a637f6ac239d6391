"""How long answers stall whose decode node is killed: `python -m bench.continuation --json`.

A router, two prefill nodes and two decode nodes of one thread each run on the demo model. Four
streams run on one decode node while the other is suspended, so that it holds nothing of them. Then
it goes on, the first one is killed, and the router continues the streams.

    prompt      the prompt is most of what must be continued, and in the prefill nodes' caches
    answer      the answer so far is most of it, and in no cache
    handoff     prefill nodes compute what must be continued, as they do by default
    local       the decode node computes it: its `local_prefill_threshold` is larger than all of it
    longest_s   longest time without a token of any stream, from the kill on; one for each round
    stalls_s    the same of each stream
    new_s       longest time to the first token of as many new prompts of as many tokens, together
    num_tokens  tokens of prompt and answer so far of each stream at the kill
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path

from bench.command import flags_of, print_figures
from bench.running_cluster import Load, RunningCluster, running_cluster
from common.observing.clock import MonotonicClock
from pdserve.checkpoints.demo_model import demo_model_folder
from pdserve.keys.redis_acl import keyless_acl
from pdserve.local_cluster.child_process import ChildProcess, start_child
from pdserve.local_cluster.embedded_redis import start_embedded_redis
from pdserve.local_cluster.free_ports import free_loopback_port
from pdserve.local_cluster.signals import Signals

NUM_STREAMS = 4
NUM_AFTER = 150
"""Tokens of each answer after the kill."""
NUM_TOKENS = 850
CASES = {"prompt": 780, "answer": 30}
"""Tokens of the prompt; those of the answer at the kill are the rest, or somewhat more."""
FIRST_TOKENS = 5
"""Streams with these have their place."""
DECODE = ("decode-1", "decode-2")
NODES = ("prefill-1", "prefill-2", *DECODE)
THRESHOLDS = {"handoff": (), "local": ("--local-prefill-threshold", str(1 << 20))}
NODE_FLAGS = ("--num-threads", "1", "--memory-fraction", "0.1")
WAIT_S = 300.0
POLL_S = 0.05


class NodesOfCluster:
    """The processes of one cluster, and how to start, suspend and kill each."""

    def __init__(self, folder: Path, redis_url: str, flags: Sequence[str]) -> None:
        self._folder = folder
        self._shared = ["--model", str(demo_model_folder()), "--redis-url", redis_url]
        self._flags = flags
        self._children: dict[str, ChildProcess] = {}

    def start(self, name: str, port: int = 0) -> ChildProcess:
        """Start the process called `name`, which begins with its role."""
        role = name.partition("-")[0]
        command = [sys.executable, "-m", "pdserve", "serve", "--role", role, "--node-id", name]
        own = ["--port", str(port)] if role == "router" else [*NODE_FLAGS]
        own += self._flags if role == "decode" else []
        root = str(Path(__file__).resolve().parent.parent)
        log_path = self._folder / f"{name}.log"
        environ = {**os.environ, "PYTHONPATH": root}
        child = start_child(name, [*command, *self._shared, *own], log_path, environ)
        self._children[name] = child
        return child

    def suspend(self, name: str) -> None:
        self._children[name].send(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self._children[name].send(signal.SIGCONT)

    def kill(self, name: str) -> None:
        self._children[name].kill()

    def kill_all(self) -> None:
        for child in self._children.values():
            child.kill()

    def require_running(self) -> None:
        """Raise `RuntimeError` with the last lines of a process that has ended."""
        for child in self._children.values():
            if child.exit_code() is not None:
                raise RuntimeError("\n".join([f"{child.name} ended:", *child.log_tail(20)]))


def stalls_s(streams: Sequence[Sequence[float]], killed_at_s: float) -> list[float]:
    """Return the longest time without a chunk of each stream that ended after the kill, s."""
    return [
        max((to - since for since, to in pairwise(chunks) if to > killed_at_s), default=0.0)
        for chunks in streams
    ]


async def wait_until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Return when the condition is true. Raises `RuntimeError` when that takes too long."""
    ends_at_s = time.monotonic() + WAIT_S
    while not await condition():
        if time.monotonic() > ends_at_s:
            raise RuntimeError(f"not within {WAIT_S:.0f} s: {what}")
        await asyncio.sleep(POLL_S)


class World:
    """A cluster that serves, with one of the decode nodes as the next to be killed."""

    def __init__(self, processes: NodesOfCluster, cluster: RunningCluster) -> None:
        self._processes = processes
        self._cluster = cluster
        self._num_asked = 0

    async def wait_complete(self) -> None:
        """Return when the router uses all nodes."""

        async def is_complete() -> bool:
            self._processes.require_running()
            nodes = await self._cluster.nodes()
            return nodes.keys() == set(NODES) and not any(
                node["is_suspected"] or not node["is_listed"] for node in nodes.values()
            )

        await wait_until(is_complete, "the router uses all nodes")

    async def measure(self, case: str, victim: str, survivor: str) -> list[float]:
        """Kill `victim` under its streams; return their stalls in s. All nodes run afterwards.

        Raises `RuntimeError` where the streams are not all on `victim`, or end too soon.
        """
        await self._suspend(survivor)
        num_prompt = CASES[case]
        num_before = NUM_TOKENS - num_prompt
        streams: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        asking = [
            asyncio.create_task(
                self._cluster.timed(self._load(num_prompt, num_before + NUM_AFTER), chunks)
            )
            for chunks in streams
        ]

        async def have(num_tokens: int) -> bool:
            if any(task.done() for task in asking):
                raise RuntimeError(f"a stream ended before all had {num_tokens} tokens")
            return all(len(chunks) >= num_tokens for chunks in streams)

        await wait_until(lambda: have(FIRST_TOKENS), "all streams run")
        self._processes.resume(survivor)
        await self.wait_complete()
        num_there = (await self._cluster.nodes())[victim]["num_requests"]
        if num_there != NUM_STREAMS:
            raise RuntimeError(f"{victim} has {num_there} streams: wanted {NUM_STREAMS}")
        await wait_until(lambda: have(num_before), "all streams are as long as wanted")
        killed_at_s = time.monotonic()
        self._processes.kill(victim)
        await asyncio.gather(*asking)
        self._processes.start(victim)
        await self.wait_complete()
        return stalls_s(streams, killed_at_s)

    async def first_tokens_s(self, num_tokens: int) -> float:
        """Ask for all streams at once; return the longest time to a first token in s."""
        loads = [self._load(num_tokens, FIRST_TOKENS) for _ in range(NUM_STREAMS)]
        timings = await asyncio.gather(*(self._cluster.timed(load) for load in loads))
        return max(timing.ttft_s for timing in timings)

    async def _suspend(self, name: str) -> None:
        self._processes.suspend(name)

        async def is_left_out() -> bool:
            node = (await self._cluster.nodes()).get(name)
            return node is None or bool(node["is_suspected"])

        await wait_until(is_left_out, f"the router leaves {name} out")

    def _load(self, num_prompt: int, num_output: int) -> Load:
        self._num_asked += 1
        return Load(
            num_prompt_tokens=num_prompt, num_output_tokens=num_output, seed=self._num_asked
        )


@asynccontextmanager
async def started(way: str) -> AsyncIterator[World]:
    """Run a cluster whose decode nodes continue answers in this way."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        with Signals() as signals:
            redis = start_embedded_redis(
                folder, folder / "redis.log", signals, MonotonicClock(), acl=keyless_acl()
            )
        stack.callback(redis.child.kill)
        processes = NodesOfCluster(folder, redis.url, THRESHOLDS[way])
        stack.callback(processes.kill_all)
        port = free_loopback_port()
        for name in ("router", *NODES):
            processes.start(name, port)
        cluster = await stack.enter_async_context(running_cluster(f"http://127.0.0.1:{port}"))
        world = World(processes, cluster)
        await world.wait_complete()
        await world.first_tokens_s(NUM_TOKENS)  # What is compiled or allocated once.
        yield world


async def measure(rounds: int) -> dict[str, object]:
    """Measure both cases in both ways."""
    figures: dict[str, dict[str, object]] = {way: {} for way in THRESHOLDS}
    for way, of_way in figures.items():
        async with started(way) as world:
            new_s = [await world.first_tokens_s(NUM_TOKENS) for _ in range(rounds)]
            of_way["new_s"] = [round(one, 2) for one in new_s]
            print(f"{way} new: {of_way['new_s']}", file=sys.stderr)
            victim, survivor = DECODE
            for case in CASES:
                stalls = []
                for _ in range(rounds):
                    stalls.append(await world.measure(case, victim, survivor))
                    print(f"{way} {case}: {max(stalls[-1]):.2f} s", file=sys.stderr)
                    victim, survivor = survivor, victim
                of_way[case] = {
                    "longest_s": [round(max(one), 2) for one in stalls],
                    "stalls_s": [[round(stall, 2) for stall in sorted(one)] for one in stalls],
                }
    return {"num_streams": NUM_STREAMS, "num_tokens": NUM_TOKENS, **figures}


def main() -> int:
    """Parse, measure, print one JSON line last."""
    parser = flags_of("bench.continuation", __doc__)
    parser.add_argument("--rounds", type=int, default=2, help="kills of each case and way")
    options = parser.parse_args()
    result = asyncio.run(measure(options.rounds))
    print_figures(result, is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
