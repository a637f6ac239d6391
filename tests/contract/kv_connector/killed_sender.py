"""A prefill node in a process of its own, which is killed in the middle of a transfer."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from common.child_process import end_with_parent
from kv_transfer.contract import Ticket
from tests.support.kv.kv_cluster import Cluster, cluster_of


@contextmanager
def killed_sender(
    cluster: Cluster,
    ticket: Ticket,
    source_blocks: Sequence[int],
    layers: Sequence[int],
    **options: Any,
) -> Iterator[None]:
    """Push `layers` to `ticket` from a node over the cluster's lane; kill it after the block.

    `options` are those of `Cluster.node`.
    """
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:
        try:
            assert sender.stdin is not None
            assert sender.stdout is not None
            what = (cluster.lane, options, ticket, source_blocks, layers)
            sender.stdin.write(pickle.dumps(what))
            sender.stdin.close()
            assert sender.stdout.readline() == b"pushed\n"
            yield
        finally:
            sender.kill()
            sender.wait()


def main() -> None:
    end_with_parent()  # its input ends before it does
    lane, options, ticket, source_blocks, layers = pickle.load(sys.stdin.buffer)
    node = cluster_of(lane).node("p", **options)
    node.connector.open(ticket, deadline_s=60)
    node.push_all(ticket, source_blocks, layers=layers)
    print("pushed", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
