"""A router, a prefill node and a decode node on this machine, as long as they are measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace

from common.nodes import Role
from common.observing.clock import MonotonicClock
from common.settings.config import Config, SpeculationConfig
from pdserve.commands.http_client import fetch_json
from pdserve.commands.role_command import give_role
from pdserve.local_cluster.cluster_plan import ClusterSize
from pdserve.local_cluster.free_ports import free_loopback_port
from pdserve.local_cluster.local_cluster import LocalCluster, serve_command
from pdserve.local_cluster.local_keys import local_admin_key
from pdserve.local_cluster.run_folder import RunFolder
from pdserve.local_cluster.signals import Signals, StopRequested


@dataclass(frozen=True, slots=True)
class OwnCluster:
    """A cluster that is ready: the URL of its router, and its administrator's key."""

    url: str
    admin_key: str = field(repr=False)

    def mix_roles(self) -> None:
        """Make every node a mixed one. Raises `RouterUnreachable` or `RouterRefused`."""
        for node in fetch_json(self.url, "/v1/cluster", api_key=self.admin_key)["nodes"]:
            give_role(self.url, node["node_id"], Role.MIXED.value, api_key=self.admin_key)


@contextmanager
def own_cluster(config: Config) -> Iterator[OwnCluster]:
    """Start a cluster of nodes with `config`, without drafts, and yield it.

    Raises `LocalClusterError` where it does not start, `KeyboardInterrupt` on a stop signal.
    """
    server = replace(config.server, host="127.0.0.1", port=free_loopback_port())
    config = replace(config, server=server, speculation=SpeculationConfig())
    size = ClusterSize(prefill=1, decode=1, mixed=0)
    try:
        with redirect_stdout(sys.stderr), Signals() as signals, RunFolder() as run:
            cluster = LocalCluster(
                config, size, run, signals, MonotonicClock(), serve_command, restarts=None
            )
            try:
                cluster.start()
                cluster.wait_until_ready()
                with signals.raising():
                    yield OwnCluster(cluster.url, local_admin_key(run.private))
            finally:
                cluster.stop()
    except StopRequested:
        raise KeyboardInterrupt from None
