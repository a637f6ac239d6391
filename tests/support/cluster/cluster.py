"""A cluster of real processes on one Redis, ready to be asked, broken and checked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import redis

from common.files.keys_folder import load_keys
from common.nodes import NodeRecord, Role
from pdserve.local_cluster.free_ports import free_loopback_port
from placement.records import decode_node
from placement.store import LiveNode
from router.dispatch.placement_recorder import TTL_S
from tests.support.clocks.patience import PATIENT
from tests.support.clocks.waiting import pause_s, wait_until
from tests.support.cluster.books import Books, NodeBooks
from tests.support.cluster.processes import SOURCES, ServeProcess

START_TIMEOUT_S = 200.0
"""Seconds are usual; the first start after a change of the kernels compiles them."""

SETTLE_TIMEOUT_S = 20.0
KEYS_TIMEOUT_S = TTL_S / 2
"""For keys that are left when nothing else is: less than they live, so that one that is held by
mistake shows."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One engine node: its id (unique in the cluster), its role, its own flags and variables."""

    node_id: str
    role: Role
    flags: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """`name` tells clusters on one Redis apart; `flags` go to every engine node.

    `routers` holds the flags of each router. `keys` is a folder of `pdserve keys init`. With
    `can_be_slow` there is `Cluster.slow`. Patient routers suspect no node that stands still for
    some seconds: for tests that ask which node did what, or how often.
    """

    name: str
    model: Path
    nodes: tuple[NodeSpec, ...]
    flags: tuple[str, ...] = ()
    routers: tuple[tuple[str, ...], ...] = ((),)
    keys: Path | None = None
    can_be_slow: bool = False
    has_patient_routers: bool = False


class Store(Protocol):
    """A Redis that a cluster is placed in, of whatever topology."""

    @property
    def url(self) -> str:
        """What the processes are told."""

    def prefix(self, cluster: str) -> str:
        """What the keys of a cluster begin with."""

    def client(self) -> redis.Redis:
        """A client of the server that has the keys; close it."""

    def keys(self, prefix: str = "") -> list[str]:
        """The keys with this prefix, sorted."""


class Cluster:
    """Processes by name: node ids, and `router-1`, `router-2` …"""

    def __init__(self, spec: ClusterSpec, store: Store, folder: Path) -> None:
        self.spec = spec
        self.store = store
        self._prefix = store.prefix(spec.name)
        self.urls: list[str] = []
        self.processes: dict[str, ServeProcess] = {}
        self._books: dict[str, NodeBooks] = {}
        self._slow_file = folder / f"{spec.name}-slow"
        slow = {"SLOW_WHILE": str(self._slow_file)} if spec.can_be_slow else {}
        shared = [
            "--model",
            str(spec.model),
            "--redis-url",
            store.url,
            "--cluster",
            spec.name,
        ]
        for node in spec.nodes:
            role = ["--role", node.role.value, "--node-id", node.node_id]
            flags = [*role, *shared, *self._keys_flags("node"), *spec.flags, *node.flags]
            self._add(node.node_id, flags, folder, {**slow, **node.environ})
        for number, own in enumerate(spec.routers, 1):
            port = free_loopback_port()
            role = ["--role", "router", "--node-id", f"router-{number}", "--port", str(port)]
            flags = [*role, *shared, *self._keys_flags("router"), *own]
            environ = {PATIENT: "yes"} if spec.has_patient_routers else {}
            self._add(f"router-{number}", flags, folder, environ)
            self.urls.append(f"http://127.0.0.1:{port}")

    def _keys_flags(self, kind: str) -> list[str]:
        return ["--keys", str(self.spec.keys / kind)] if self.spec.keys else []

    @property
    def headers(self) -> dict[str, str]:
        """What a client shows; nothing where there are no keys."""
        if self.spec.keys is None:
            return {}
        key = (self.spec.keys / "client/api.key").read_text()
        return {"authorization": f"Bearer {key}"}

    def _add(
        self, name: str, arguments: list[str], folder: Path, environ: Mapping[str, str]
    ) -> None:
        log_path = folder / f"{self.spec.name}-{name}.log"
        self.processes[name] = ServeProcess(name, arguments, log_path, environ)

    @property
    def url(self) -> str:
        """The first router."""
        return self.urls[0]

    # --- life ---------------------------------------------------------------------------------

    def start(self, sources: Path = SOURCES) -> None:
        """Start everything from this checkout, or from another one; `wait_ready` waits for it."""
        for process in self.processes.values():
            process.start(sources)

    def wait_ready(self) -> None:
        """Return when every router has every node in its choice, in its present life, trusts it,
        and has every pair of them."""
        wanted = {node.node_id for node in self.spec.nodes}

        def is_ready() -> bool:
            for process in self.processes.values():
                process.require_running()
            alive = {n.record.incarnation.node_id: n for n in self.live_nodes()}
            if alive.keys() != wanted:
                return False
            epochs = {name: node.record.incarnation.epoch for name, node in alive.items()}
            return all(self._places_on_all(url, epochs) for url in self.urls)

        wait_until(is_ready, f"{self.spec.name} is ready", timeout_s=START_TIMEOUT_S)
        self._open_books()

    def _places_on_all(self, url: str, epochs: Mapping[str, int]) -> bool:
        """Whether a router chooses just these nodes, suspects none, and avoids no pair of them."""
        try:
            nodes = self._seen_by(url)["nodes"]
        except httpx.TransportError:
            return False
        # A router of the release before does not tell the pairs.
        avoided = [decode for node in nodes for decode in node.get("kv_unreachable", ())]
        is_wary = any(node["is_suspected"] for node in nodes) or any(
            epochs.get(decode["node_id"]) == decode["epoch"] for decode in avoided
        )
        return {node["node_id"]: node["epoch"] for node in nodes} == epochs and not is_wary

    def wait_trusted(self) -> None:
        """Return when every router chooses any node of the present life, and any pair of them.

        A node that was silent for a moment, on a machine that has much to do, is avoided for a
        moment: a test that looks at one node would find its request on another one.
        """
        epochs = {name: books.record.incarnation.epoch for name, books in self._books.items()}
        wait_until(
            lambda: all(self._places_on_all(url, epochs) for url in self.urls),
            f"the routers of {self.spec.name} trust every node",
        )

    def wait_seen_idle(self) -> None:
        """Return when every router has read that all nodes are idle, and suspects none.

        The load that a router reads may be some seconds old: a node that has just ended its
        requests looks fuller than another one.
        """
        wait_until(
            lambda: all(self._sees_idle(url) for url in self.urls),
            f"the routers of {self.spec.name} see idle nodes",
        )

    def _sees_idle(self, url: str) -> bool:
        try:
            nodes = self._seen_by(url)["nodes"]
        except httpx.TransportError:
            return False
        return len(nodes) == len(self.spec.nodes) and all(
            node["num_requests"] == 0
            and node["free_blocks"] == node["num_blocks"]
            and not node["is_suspected"]
            for node in nodes
        )

    def mend(self) -> None:
        """Start again whatever has ended, under its old name, and wait until all of it serves."""
        for process in self.processes.values():
            if not process.is_running:
                process.start()
        self.wait_ready()

    def close(self) -> None:
        """End everything, however it is: what cannot be ended keeps nothing else."""
        with contextlib.ExitStack() as ends:
            for process in reversed(self.processes.values()):
                ends.callback(process.kill)
            for books in self._books.values():
                ends.callback(books.close)

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """Steps take long on every node: what runs goes on running while a test does something to
        it, however fast the nodes are or slow the test."""
        assert self.spec.can_be_slow
        self._slow_file.touch()
        try:
            yield
        finally:
            self._slow_file.unlink()

    def hold_lock(self, node_id: str) -> None:
        """A step of a slow node holds its interpreter lock for `HELD_S`; return in the middle."""
        held = Path(f"{self._slow_file}.held.{node_id}")
        held.touch()
        wait_until(lambda: not held.exists(), f"{node_id} holds its interpreter lock")

    def fail_gpu(self, node_id: str) -> None:
        """The GPU of a slow node fails beside its next step."""
        Path(f"{self._slow_file}.failed.{node_id}").touch()

    @contextlib.contextmanager
    def hung(self, node_id: str) -> Iterator[None]:
        """A step of a slow node does not end."""
        hung = Path(f"{self._slow_file}.hung.{node_id}")
        hung.touch()
        try:
            yield
        finally:
            hung.unlink()

    # --- looking at it ------------------------------------------------------------------------

    def live_nodes(self) -> list[LiveNode]:
        """Every lease in the placement store; none while it is away."""
        try:
            with self.store.client() as client:
                keys = [key.encode() for key in self.store.keys(self._prefix + "node:")]
                values = [client.get(key) for key in keys]
        except (redis.ConnectionError, redis.TimeoutError):
            return []
        return [decode_node(value) for value in values if isinstance(value, bytes)]

    def chosen_nodes(self, url: str) -> dict[str, int]:
        """The nodes that a router can choose, with their epochs; none when it does not answer."""
        try:
            nodes = self._seen_by(url)["nodes"]
        except httpx.TransportError:
            return {}
        return {node["node_id"]: node["epoch"] for node in nodes}

    def status(self, node_id: str) -> Books:
        """A node's own books."""
        return self._books[node_id].read()

    def record(self, node_id: str) -> NodeRecord:
        """What a node says of its present life."""
        return self._books[node_id].record

    def wait_status(self, node_id: str, condition: Callable[[Books], bool], what: str) -> None:
        """Return when a node's books fulfil a condition; an answer that is late is asked again."""

        def is_so() -> bool:
            try:
                return condition(self.status(node_id))
            except httpx.TimeoutException:
                return False

        wait_until(is_so, f"{node_id}: {what}")

    # --- the closing check --------------------------------------------------------------------

    def check_settled(self, *, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Fails unless, soon, nothing is held for any request anywhere."""
        ends_at_s = time.monotonic() + timeout_s
        keys_end_at_s = ends_at_s
        while True:
            began_s = time.monotonic()
            if not (held := self.held()):
                return
            if any(not what.startswith("Redis has") for what in held):
                keys_end_at_s = min(ends_at_s, time.monotonic() + KEYS_TIMEOUT_S)
            if time.monotonic() > min(ends_at_s, keys_end_at_s):
                raise AssertionError("still held:\n  " + "\n  ".join(held))
            time.sleep(pause_s(time.monotonic() - began_s))

    def held(self) -> list[str]:
        """What is held for requests now, in words."""
        held = []
        for node in self.spec.nodes:
            self.processes[node.node_id].require_running()
            try:
                books = self.status(node.node_id)
                held += [f"{node.node_id} has {what}" for what in books.held()]
            except httpx.TransportError as error:
                held.append(f"{node.node_id} does not answer: {error}")
        for url in self.urls:
            try:
                num_running = self._seen_by(url)["router"]["num_running"]
            except httpx.TransportError as error:
                held.append(f"{url} does not answer: {error}")
                continue
            if num_running:
                held.append(f"{url} has {num_running} requests")
        held += [f"Redis has {key}" for key in self.store.keys(self._prefix)]
        return [entry for entry in held if entry not in self._expected_keys()]

    def _seen_by(self, url: str) -> dict[str, Any]:
        """Return what a router says of the cluster. Raises `httpx.TransportError`."""
        reply = httpx.get(f"{url}/v1/cluster", headers=self.headers, timeout=5.0)
        seen: dict[str, Any] = reply.json()
        return seen

    def _expected_keys(self) -> frozenset[str]:
        nodes = [node.node_id for node in self.spec.nodes]
        names = ["nodes", "leader", "move", *(f"node:{node}" for node in nodes)]
        names += [f"epoch:{name}" for name in self.processes]
        return frozenset(f"Redis has {self._prefix}{name}" for name in names)

    def _open_books(self) -> None:
        for node in self.live_nodes():
            node_id = node.record.incarnation.node_id
            books = self._books.get(node_id)
            if books is None or books.record != node.record:
                if books is not None:
                    books.close()
                keys = self.spec.keys
                own = load_keys(keys / "router", Role.ROUTER) if keys else None
                self._books[node_id] = NodeBooks(node.record, own)


@contextlib.contextmanager
def running(specs: Sequence[ClusterSpec], store: Store, folder: Path) -> Iterator[list[Cluster]]:
    """Clusters that start side by side, and are gone at the end."""
    clusters = [Cluster(spec, store, folder) for spec in specs]
    try:
        for cluster in clusters:
            cluster.start()
        for cluster in clusters:
            cluster.wait_ready()
        yield clusters
    finally:
        for cluster in clusters:
            cluster.close()
