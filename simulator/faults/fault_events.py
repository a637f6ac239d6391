"""The begin and the end of each kind of fault in a cluster."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from common.nodes import Role
from simulator.faults.history import Fault
from simulator.faults.hosts import Paths, ProcessClock
from simulator.faults.kinds import STORE, FaultKind
from simulator.faults.kv.wires import KVWires
from simulator.faults.node.disk import Disk
from simulator.faults.node.faulty_node import FaultyNode
from simulator.faults.router import FaultyRouter
from simulator.faults.store.leases import Leases
from simulator.timeline import Timeline


class Breakable(Protocol):
    """A cluster as faults break it: its processes, their paths, the store and the disks."""

    timeline: Timeline
    paths: Paths
    leases: Leases
    wires: KVWires
    disk: Disk
    nodes: dict[str, FaultyNode]
    routers: dict[str, FaultyRouter]
    router_stood_s: float
    revisions: dict[str, int]
    """The revision with which a node starts from now on, by name; 0 without."""

    def start_node(self, name: str, node_id: str) -> None:
        """Start a node, in another life than before."""

    def stop_node(self, name: str, *, is_known: bool) -> None:
        """End a node's process; its host says so if `is_known`."""

    def start_router(self, name: str) -> None:
        """Start a router, in another life than before."""

    def stop_router(self, name: str, *, is_known: bool) -> None:
        """End a router's process."""

    def flush(self) -> None:
        """Deliver the messages that waited for a path that is open again."""


def begin(cluster: Breakable, fault: Fault) -> None:
    """Begin a fault. One that meets a process which is dead already does nothing."""
    match fault.kind:
        case FaultKind.CRASH if fault.target in cluster.routers:
            _crash_router(cluster, fault)
        case FaultKind.CRASH if fault.target in cluster.nodes:
            _crash_node(cluster, fault)
        case FaultKind.FREEZE:
            _freeze(cluster, fault)
        case FaultKind.PARTITION:
            _cut(cluster, fault)
        case FaultKind.LOSS | FaultKind.REPEAT:
            _break(cluster, fault)
        case FaultKind.CLOCK:
            _jump(cluster, fault)
        case FaultKind.STORE if fault.how == "empty":
            cluster.leases.empty()
        case FaultKind.STORE:
            _lose_store(cluster, fault)
        case FaultKind.STEP if fault.target in cluster.nodes:
            _fail_steps(cluster, fault)
        case FaultKind.HANG if fault.target in cluster.nodes:
            node = cluster.nodes[fault.target]
            node.clock.run(partial(node.hang, fault.span_s))
        case FaultKind.ROLE | FaultKind.DRAIN | FaultKind.UPGRADE if fault.target in cluster.nodes:
            _change(cluster, fault)
        case FaultKind.DISK:
            _trouble_disk(cluster, fault)
        case _:
            pass


def _crash_router(cluster: Breakable, fault: Fault) -> None:
    name = fault.target
    if cluster.routers[name].clock.is_alive:
        cluster.stop_router(name, is_known=fault.how != "silent")
        if fault.span_s:
            cluster.timeline.after(fault.span_s, partial(cluster.start_router, name))


def _crash_node(cluster: Breakable, fault: Fault) -> None:
    node = cluster.nodes[fault.target]
    cluster.stop_node(fault.target, is_known=fault.how != "silent")
    if fault.span_s:
        name = node.me.node_id + "x" * (fault.how == "renamed")
        cluster.timeline.after(fault.span_s, partial(cluster.start_node, fault.target, name))


def _clock_of(cluster: Breakable, name: str) -> ProcessClock | None:
    if name in cluster.routers:
        return cluster.routers[name].clock
    node = cluster.nodes.get(name)
    return None if node is None else node.clock


def _freeze(cluster: Breakable, fault: Fault) -> None:
    clock = _clock_of(cluster, fault.target)
    if clock is not None and clock.is_running:
        clock.freeze()
        cluster.timeline.after(fault.span_s, clock.thaw)
        if fault.target in cluster.routers:
            cluster.router_stood_s += fault.span_s


def _host_of(cluster: Breakable, name: str) -> str:
    """Return the name under which the process reaches others: it may have started under another."""
    node = cluster.nodes.get(name)
    return name if node is None else node.me.node_id


def _cut(cluster: Breakable, fault: Fault) -> None:
    first, second = _host_of(cluster, fault.target), _host_of(cluster, fault.other)
    ways = []
    if fault.how in ("both", "to"):
        ways.append((first, second))
    if fault.how in ("both", "from"):
        ways.append((second, first))
    for way in ways:
        cluster.paths.cut(*way)

    def mend() -> None:
        for way in ways:
            cluster.paths.mend(*way)
        cluster.flush()

    cluster.timeline.after(fault.span_s, mend)


def _break(cluster: Breakable, fault: Fault) -> None:
    arrives = fault.kind is FaultKind.REPEAT
    first, second = fault.target, fault.other
    if second in cluster.routers:
        first, second = second, first
    if first not in cluster.routers:
        hosts = _host_of(cluster, first), _host_of(cluster, second)
        cluster.wires.break_between(*hosts, arrives=arrives)
        return
    for link in list(cluster.routers[first].links.values()):
        if link.node is cluster.nodes.get(second):
            link.on_break(arrives=arrives)


def _jump(cluster: Breakable, fault: Fault) -> None:
    if fault.target == STORE:
        cluster.leases.ahead_s += fault.span_s
        return
    clock = _clock_of(cluster, fault.target)
    if clock is None or not clock.is_alive:
        return
    clock.jump(fault.span_s)
    node = cluster.nodes.get(fault.target)
    if node is not None:
        clock.run(node.wake)


def _change(cluster: Breakable, fault: Fault) -> None:
    """Ask a router for a change, as an administrator does."""
    node, router = cluster.nodes[fault.target], cluster.routers[fault.other]
    if fault.kind is FaultKind.ROLE:
        change = partial(router.beside.give_role, node.me.node_id, Role(fault.how))
    else:
        node.restarts_in_s = fault.span_s
        if fault.kind is FaultKind.UPGRADE:
            cluster.revisions[fault.target] = ("old", "new").index(fault.how)
        change = partial(router.beside.have_leave, node.me.node_id)
    router.clock.run(change)


def _fail_steps(cluster: Breakable, fault: Fault) -> None:
    node = cluster.nodes[fault.target]
    node.copies.is_failing = fault.how == "copy"
    node.steps.failing = "" if fault.how == "copy" else fault.how

    def mend() -> None:
        node.copies.is_failing, node.steps.failing = False, ""

    cluster.timeline.after(fault.span_s, mend)


def _trouble_disk(cluster: Breakable, fault: Fault) -> None:
    trouble = cluster.disk.trouble
    trouble[fault.target] = fault.how
    cluster.timeline.after(fault.span_s, partial(trouble.pop, fault.target, ""))


def _lose_store(cluster: Breakable, fault: Fault) -> None:
    cluster.leases.is_away = True

    def back() -> None:
        cluster.leases.is_away = False

    cluster.timeline.after(fault.span_s, back)
