"""Faults done to a running cluster, each undone when it has lasted long enough."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from functools import partial

import redis.exceptions

from common.nodes import Role
from tests.soak.cluster import ROLES, Links
from tests.soak.schedule import Fault
from tests.support.cluster.cluster import Cluster
from tests.support.kv.links import Link
from tests.support.stores.redis_server import RedisServer

DELAY_S = 0.3
DRAIN_LIMIT_S = 90.0

Undo = Callable[[], None]


def nothing() -> None:
    """Undo what ended by itself."""


class Injector:
    """Performs faults: `begin` returns what ends the fault."""

    def __init__(self, cluster: Cluster, links: Mapping[str, Links], store: RedisServer) -> None:
        self._cluster = cluster
        self._links = links
        self._store = store

    def begin(self, fault: Fault) -> Undo:
        """Begin a fault."""
        if fault.target == "store":
            return self._break_store(fault.kind)
        process = self._cluster.processes[fault.target]
        match fault.kind:
            case "kill":
                process.kill()
                return process.start
            case "restart":
                process.kill()
                process.start()
            case "freeze_1_s" | "freeze_10_s" | "freeze_60_s":
                process.freeze()
                return process.thaw
            case "network_cut":
                return self._change_links(fault.target, Link.cut)
            case "network_cut_to_node" | "network_cut_from_node":
                cut = partial(Link.cut_one_way, is_back=fault.kind == "network_cut_from_node")
                return self._change_links(fault.target, cut)
            case "network_delay":
                for link in self._links[fault.target].both():
                    link.delay_s = DELAY_S
                return self._mending(fault.target)
            case "dead_kv_port":
                self._links[fault.target].kv.refuse()
                return self._mending(fault.target)
            case "drain":
                process.begin_stop()
                return lambda: self._start_after_drain(fault.target)
            case _:
                raise ValueError(f"no fault is named {fault.kind}")
        return nothing

    def heal(self) -> None:
        """Start whatever has ended."""
        for link in self._links.values():
            for one in link.both():
                one.mend()
        self._cluster.mend()

    def _change_links(self, node_id: str, change: Callable[[Link], None]) -> Undo:
        for link in self._links[node_id].both():
            change(link)
        return self._mending(node_id)

    def _mending(self, node_id: str) -> Undo:
        def mend() -> None:
            for link in self._links[node_id].both():
                link.mend()

        return mend

    def _start_after_drain(self, name: str) -> None:
        """Start the process again under its name, when it has drained."""
        process = self._cluster.processes[name]
        try:
            code = process.wait(DRAIN_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} did not end within {DRAIN_LIMIT_S:.0f} s") from None
        assert code == 0, f"{name} ended its drain with {code}"
        process.start()

    def _break_store(self, kind: str) -> Undo:
        store = self._store
        match kind:
            case "store_frozen":
                store.freeze()
                return store.thaw
            case "store_killed":
                store.kill()
                return store.start
            case "store_flushed":
                with store.client() as client:
                    client.flushall()
                return nothing
            case "store_read_only":
                self._set_min_replicas(1)
                return lambda: self._set_min_replicas(0)
            case _:
                raise ValueError(f"no fault of the store is named {kind}")

    def _set_min_replicas(self, number: int) -> None:
        """With one wanted and none there, Redis reads and refuses to write."""
        with self._store.client() as client:
            try:
                client.config_set("min-replicas-to-write", number)
            except redis.exceptions.ResponseError as error:
                raise AssertionError(f"Redis refused the setting: {error}") from error


def nodes_of(role: Role) -> list[str]:
    """The names of a role's processes."""
    return [name for name, its in ROLES.items() if its is role]
