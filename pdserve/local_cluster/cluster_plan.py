"""Which processes a local cluster has, and the configuration of each. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.config import Config
from common.nodes import Role
from pdserve.configuration.config_sources import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSize:
    """How many nodes of each kind."""

    prefill: int
    decode: int
    mixed: int

    @classmethod
    def chosen(cls, *, prefill: int | None, decode: int | None, mixed: int | None) -> ClusterSize:
        """Fill in what was not given: one prefill and one decode node, unless mixed nodes do both.

        Raises `SettingsError` when the nodes could not answer anything.
        """
        otherwise = 0 if mixed else 1
        size = cls(
            prefill=otherwise if prefill is None else prefill,
            decode=otherwise if decode is None else decode,
            mixed=mixed or 0,
        )
        if not size.mixed and not (size.prefill and size.decode):
            raise SettingsError(
                [
                    f"--prefill {size.prefill} --decode {size.decode} --mixed {size.mixed} "
                    "cannot answer: wanted a prefill and a decode node, or a mixed node"
                ]
            )
        return size


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """A process by the name that its log file and messages use."""

    name: str
    config: Config


def plan_cluster(base: Config, size: ClusterSize, redis_url: str) -> list[PlannedProcess]:
    """The router first, then the nodes. Each node's name is also its node id."""
    placement = replace(base.placement, redis_url=redis_url)
    router = replace(
        base,
        role=Role.ROUTER,
        server=replace(base.server, node_id="router"),
        placement=placement,
        # Judged for the cluster as a whole: all that its router speaks to is on loopback.
        security=replace(base.security, insecure=True),
    )
    planned = [PlannedProcess("router", router)]
    counts = ((Role.PREFILL, size.prefill), (Role.DECODE, size.decode), (Role.MIXED, size.mixed))
    for role, count in counts:
        for number in range(1, count + 1):
            name = f"{role.value}-{number}"
            # Nodes talk to each other and the router on this machine alone, on any free port.
            server = replace(
                base.server, host="127.0.0.1", port=0, kv_port=0, metrics_port=0, node_id=name
            )
            node = replace(base, role=role, server=server, placement=placement)
            planned.append(PlannedProcess(name, node))
    return planned
