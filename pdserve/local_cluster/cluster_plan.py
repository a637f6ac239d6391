"""Which processes a local cluster has, and the configuration of each. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from common.nodes import Role
from common.settings.config import Config
from pdserve.configuration.config_sources import SettingsError
from pdserve.configuration.flags import UP_MEMORY_FRACTION

_OF_A_CARD = 0.9
"""The part of a card's memory that its nodes take together by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSize:
    """The number of nodes of each role."""

    prefill: int
    decode: int
    mixed: int

    @property
    def num_nodes(self) -> int:
        """How many nodes there are of all roles."""
        return self.prefill + self.decode + self.mixed

    @classmethod
    def chosen(cls, *, prefill: int | None, decode: int | None, mixed: int | None) -> ClusterSize:
        """Return the size: one prefill and one decode node by default, none beside mixed nodes.

        Raises `SettingsError` when such nodes could not answer requests.
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
    """A process, with the name that its log file and messages use."""

    name: str
    config: Config


def plan_cluster(
    base: Config, size: ClusterSize, redis_url: str, keys: Path, *, num_cores: int
) -> list[PlannedProcess]:
    """Return the router, then the nodes. Each node's name is also its node id.

    `keys` is a folder of keys that this cluster alone has: other users of the machine reach the
    ports of the nodes too. The router asks its clients for a key where one is configured.

    The nodes share the machine: each gets an equal part of `memory_fraction`, and where there are
    more nodes than the `num_cores` cores, one thread. A step waits for each thread that has begun a
    share of it, also for one that lost its core to another node: it then takes several times as
    long. With `gpus` the nodes take turns on these cards, and the memory is that of a card.
    """
    placement = replace(base.placement, redis_url=redis_url)
    router = replace(
        base,
        role=Role.ROUTER,
        server=replace(base.server, node_id="router"),
        placement=placement,
        security=replace(base.security, keys=str(keys / "router"), open_api=not base.api.api_key),
    )
    planned = [PlannedProcess("router", router)]
    cards = base.engine.gpus.split(",")
    of_all = base.engine.memory_fraction or (_OF_A_CARD if cards[0] else UP_MEMORY_FRACTION)
    num_sharing = -(-size.num_nodes // len(cards))
    num_threads = base.engine.num_threads or (1 if size.num_nodes > num_cores else 0)
    security = replace(base.security, keys=str(keys / "node"))
    engine = replace(base.engine, memory_fraction=of_all / num_sharing, num_threads=num_threads)
    counts = ((Role.PREFILL, size.prefill), (Role.DECODE, size.decode), (Role.MIXED, size.mixed))
    for role, count in counts:
        for number in range(1, count + 1):
            name = f"{role.value}-{number}"
            card = cards[(len(planned) - 1) % len(cards)]
            # Nodes communicate on this machine only, on any free port.
            server = replace(
                base.server, host="127.0.0.1", port=0, kv_port=0, metrics_port=0, node_id=name
            )
            node = replace(
                base,
                role=role,
                server=server,
                placement=placement,
                engine=replace(engine, gpus=card),
                security=security,
            )
            planned.append(PlannedProcess(name, node))
    return planned
