"""What each kind of fault does to a cluster, and how it ends."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from common.nodes import Role
from simulator.faults.history import STORE, Fault, FaultKind
from simulator.faults.hosts import ProcessClock

if TYPE_CHECKING:
    from simulator.faults.cluster import FaultyCluster


def begin(cluster: FaultyCluster, fault: Fault) -> None:
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
        case FaultKind.ROLE | FaultKind.DRAIN if fault.target in cluster.nodes:
            _change(cluster, fault)
        case FaultKind.DISK:
            _trouble_disk(cluster, fault)
        case _:
            pass


def _crash_router(cluster: FaultyCluster, fault: Fault) -> None:
    name = fault.target
    if cluster.routers[name].clock.is_alive:
        cluster.stop_router(name, is_known=fault.how != "silent")
        if fault.span_s:
            cluster.timeline.after(fault.span_s, partial(cluster.start_router, name))


def _crash_node(cluster: FaultyCluster, fault: Fault) -> None:
    node = cluster.nodes[fault.target]
    cluster.stop_node(fault.target, is_known=fault.how != "silent")
    if fault.span_s:
        name = node.me.node_id + "x" * (fault.how == "renamed")
        cluster.timeline.after(fault.span_s, partial(cluster.start_node, fault.target, name))


def _clock_of(cluster: FaultyCluster, name: str) -> ProcessClock | None:
    if name in cluster.routers:
        return cluster.routers[name].clock
    node = cluster.nodes.get(name)
    return None if node is None else node.clock


def _freeze(cluster: FaultyCluster, fault: Fault) -> None:
    clock = _clock_of(cluster, fault.target)
    if clock is not None and clock.is_running:
        clock.freeze()
        cluster.timeline.after(fault.span_s, clock.thaw)
        if fault.target in cluster.routers:
            cluster.router_stood_s += fault.span_s


def _host_of(cluster: FaultyCluster, name: str) -> str:
    """Return the name under which the process reaches others: it may have started under another."""
    node = cluster.nodes.get(name)
    return name if node is None else node.me.node_id


def _cut(cluster: FaultyCluster, fault: Fault) -> None:
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


def _break(cluster: FaultyCluster, fault: Fault) -> None:
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


def _jump(cluster: FaultyCluster, fault: Fault) -> None:
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


def _change(cluster: FaultyCluster, fault: Fault) -> None:
    """Ask a router for a change, as an administrator does."""
    node, router = cluster.nodes[fault.target], cluster.routers[fault.other]
    if fault.kind is FaultKind.ROLE:
        change = partial(router.beside.give_role, node.me.node_id, Role(fault.how))
    else:
        node.restarts_in_s = fault.span_s
        change = partial(router.beside.drain, node.me.node_id)
    router.clock.run(change)


def _trouble_disk(cluster: FaultyCluster, fault: Fault) -> None:
    trouble = cluster.disk.trouble
    trouble[fault.target] = fault.how
    cluster.timeline.after(fault.span_s, partial(trouble.pop, fault.target, ""))


def _lose_store(cluster: FaultyCluster, fault: Fault) -> None:
    cluster.leases.is_away = True

    def back() -> None:
        cluster.leases.is_away = False

    cluster.timeline.after(fault.span_s, back)
