"""What clients of a cluster are promised while another one attacks it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.watching import watching

LONGEST_S = {"stream": 4.0, "health": 4.0, "completion": 8.0}
"""Between two events of a stream, or for an answer, where every process has a core at once.

What other processes take of the cores is left out as far as the kernel tells it: an attacker is a
process of this machine as well, and so is whatever else runs on it. Threads of one process that
wait one after the other count once, and cores that two threads share compute at half the speed: of
0.3 s in peace 1.2 s were left where six processes of tests shared two cores. An attack that holds
up a router does so for many seconds, or for good.
"""


@contextmanager
def served_beside(cluster: Cluster) -> Iterator[None]:
    """Streams, answers and `/health` of the first router are as in peace, and none stands still."""
    pids = [process.pid for process in cluster.processes.values()]
    with watching(cluster.url, pids, cluster.headers) as news:
        yield
        waits = news()
    waits += news()
    assert not [wait for wait in waits if wait.fault]
    for kind, longest_s in LONGEST_S.items():
        longest = max((w for w in waits if w.kind == kind), key=lambda w: w.own_s, default=None)
        if longest is not None:
            print(f"{kind}: {longest.own_s:.3f} s and {longest.queued_s:.3f} s without a core")
            assert longest.own_s <= longest_s, longest
