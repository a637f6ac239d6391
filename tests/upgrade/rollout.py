"""What is replaced in which order: the rolling restart of docs/operations.md."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from common.ids import Incarnation
from common.nodes import Role
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.cluster import START_TIMEOUT_S, Cluster, ClusterSpec, NodeSpec
from tests.support.stores.redis_server import RedisServer
from tests.upgrade.handoffs import Handoffs
from tests.upgrade.watch import EVERY_S, Watch

NODES = {
    "prefill-1": Role.PREFILL,
    "prefill-2": Role.PREFILL,
    "decode-1": Role.DECODE,
    "decode-2": Role.DECODE,
}
UPGRADED = ("router-1", "router-2", *NODES)
"""The documented order: routers, prefill nodes, decode nodes."""
ROLLED_BACK = ("router-1", "prefill-1", "decode-2")
"""In the same order. Routers choose nodes in turn, so both pairs have both releases then."""
RELAID = ("prefill-2", "decode-1")
"""Get another KV layout at the end, as another release may have."""

BLOCK_SIZE, OTHER_BLOCK_SIZE = "16", "32"
NODE_DRAIN_S = "4"
"""Shorter than the longest answers, so that some are handed over to the other release."""
ROUTER_DRAIN_S = "60"
DRAIN_LIMIT_S = 90.0
USE_LIMIT_S = 60.0


def spec_of(model: Path) -> ClusterSpec:
    """Two processes of each kind. KV goes through shared memory from one prefill node, by ZMQ from
    the other. Decode nodes cache no prompts, so each prompt is handed off."""
    decode = ("--local-prefill-threshold", "16", "--no-enable-prefix-caching")
    own = {
        "prefill-1": ("--max-num-batched-tokens", "128"),
        "prefill-2": ("--max-num-batched-tokens", "128", "--kv-transport", "zmq"),
        "decode-1": decode,
        "decode-2": decode,
    }
    return ClusterSpec(
        name="upgrade",
        model=model,
        nodes=tuple(NodeSpec(name, role, own[name]) for name, role in NODES.items()),
        flags=(
            *("--block-size", BLOCK_SIZE, "--num-threads", "1", "--kv-cache-memory", "16MiB"),
            *("--drain-timeout-s", NODE_DRAIN_S),
        ),
        routers=(("--drain-timeout-s", ROUTER_DRAIN_S, "--placement-policy", "round_robin"),) * 2,
        can_be_slow=True,
    )


def compile_kernels(
    model: Path, releases: Sequence[Path], redis_server: RedisServer, folder: Path
) -> None:
    """Start one node of each release side by side, once. What is cached compiles nothing."""
    nodes = tuple(NodeSpec(f"mixed-{number}", Role.MIXED) for number in range(len(releases)))
    flags = ("--block-size", BLOCK_SIZE, "--num-threads", "1", "--kv-cache-memory", "16MiB")
    spec = ClusterSpec(name="compiling", model=model, nodes=nodes, flags=flags, routers=())
    cluster = Cluster(spec, redis_server, folder)
    try:
        for node, sources in zip(nodes, releases, strict=True):
            cluster.processes[node.node_id].start(sources)
        cluster.wait_ready()
    finally:
        cluster.close()


@dataclass(frozen=True, slots=True)
class Replaced:
    """A process that was replaced, on the monotonic clock: SIGTERM, exit and ready."""

    name: str
    release: str
    stopped_s: float
    exited_s: float
    ready_s: float


class Rollout:
    """Replaces processes of a cluster one at a time, as docs/operations.md says."""

    def __init__(self, cluster: Cluster, watch: Watch) -> None:
        self._cluster = cluster
        self._watch = watch
        self._http = httpx.Client(timeout=60.0, trust_env=False)
        self.done: list[Replaced] = []

    def close(self) -> None:
        self._http.close()

    def replace(self, names: Sequence[str], release: str, sources: Path) -> None:
        """Replace one after the other; the next one when the one before it takes its part."""
        for name in names:
            self._replace(name, release, sources)
            self._wait_for_use(name)

    def relay(self, names: Sequence[str], release: str, sources: Path) -> None:
        """Replace a prefill and a decode node by ones of another KV layout: they are a pair."""
        for name in names:
            self._replace(name, release, sources, ("--block-size", OTHER_BLOCK_SIZE))
        for name in names:
            self._wait_for_use(name)

    def wait_for_mixed_pairs(self) -> None:
        """Wait until both releases have worked together in every way that they can."""
        ends_s = time.monotonic() + USE_LIMIT_S
        while (missing := self._watch.ask(Handoffs.missing)) and time.monotonic() < ends_s:
            time.sleep(EVERY_S)
        assert not missing, f"not within {USE_LIMIT_S:.0f} s: " + "; ".join(missing)

    def _replace(self, name: str, release: str, sources: Path, flags: Sequence[str] = ()) -> None:
        process = self._cluster.processes[name]
        before = self._latest_life(name)
        stopped_s = time.monotonic()
        process.begin_stop()
        try:
            code = process.wait(DRAIN_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} did not end within {DRAIN_LIMIT_S:.0f} s") from None
        assert code == 0, f"{name} ended its drain with {code}"
        exited_s = time.monotonic()
        process.start(sources, flags)
        if name in NODES:
            self._wait_for_node(name, before)
        else:
            self._wait_for_router(name)
        ready_s = time.monotonic()
        print(f"{name} is of {release} release after {ready_s - stopped_s:.1f} s", flush=True)
        self.done.append(Replaced(name, release, stopped_s, exited_s, ready_s))

    def _wait_for_use(self, name: str) -> None:
        if name not in NODES:
            return
        node = Incarnation(name, self._latest_life(name))
        wait_until(
            lambda: self._watch.ask(lambda seen: seen.is_used(node)),
            f"KV from or to {node}",
            timeout_s=USE_LIMIT_S,
        )

    def _wait_for_router(self, name: str) -> None:
        url = self._cluster.urls[int(name.removeprefix("router-")) - 1]

        def is_ready() -> bool:
            self._cluster.processes[name].require_running()
            try:
                return self._http.get(f"{url}/ready").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_ready, f"{name} is ready", timeout_s=START_TIMEOUT_S)

    def _wait_for_node(self, name: str, before: int) -> None:
        """Wait until a router lists it, as `pdserve status` shows it."""

        def is_listed() -> bool:
            self._cluster.processes[name].require_running()
            nodes = self._http.get(f"{self._cluster.url}/v1/cluster").json()["nodes"]
            epochs = [node["epoch"] for node in nodes if node["node_id"] == name]
            return epochs not in ([], [before])

        wait_until(is_listed, f"{name} is listed", timeout_s=START_TIMEOUT_S)

    def _latest_life(self, name: str) -> int:
        epochs = [n.record.epoch for n in self._cluster.live_nodes() if n.record.node_id == name]
        return epochs[0] if epochs else 0
