"""A router, a prefill node and a decode node on this machine, as long as they are measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace

from common.observing.clock import MonotonicClock
from common.settings.config import Config, SpeculationConfig
from pdserve.local_cluster.cluster_plan import ClusterSize
from pdserve.local_cluster.free_ports import free_loopback_port
from pdserve.local_cluster.local_cluster import LocalCluster, serve_command
from pdserve.local_cluster.run_folder import RunFolder
from pdserve.local_cluster.signals import Signals, StopRequested


@contextmanager
def own_cluster(config: Config) -> Iterator[str]:
    """Start a cluster of nodes with `config`, without drafts, and yield its URL.

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
                    yield cluster.url
            finally:
                cluster.stop()
    except StopRequested:
        raise KeyboardInterrupt from None
