"""The cluster of a soak: two routers, two prefill nodes, two decode nodes, behind links."""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.nodes import Role
from pdserve.local_cluster.free_ports import free_loopback_port
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec
from tests.support.kv.links import Link
from tests.support.stores.redis_server import RedisServer

CONTROL, KV, PULL_ALL = "SOAK_CONTROL_ADDRESS", "SOAK_KV_ENDPOINT", "SOAK_PULL_ALL"
ROLES = {
    "prefill-1": Role.PREFILL,
    "prefill-2": Role.PREFILL,
    "decode-1": Role.DECODE,
    "decode-2": Role.DECODE,
    "router-1": Role.ROUTER,
    "router-2": Role.ROUTER,
}
DRAIN_S = "20"

# A node tells others the addresses of its links, and listens on its own.
_ADVERTISE_THE_LINKS = f"""
    import dataclasses
    import os
    import sys

    if "{CONTROL}" in os.environ:
        sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
        import node.life.self_description as self_description
        from kv_transfer.zmq.transport import ZmqTransport

        ZmqTransport.endpoint = property(lambda self: os.environ["{KV}"])
        own_records = self_description.node_records

        def records_of_the_link(*args, **kwargs):
            return {{
                role: dataclasses.replace(record, control_address=os.environ["{CONTROL}"])
                for role, record in own_records(*args, **kwargs).items()
            }}

        self_description.node_records = records_of_the_link
"""

# A node whose books do not balance after a step ends at once. With small pools it pulls whatever
# another node has: computing is quicker with so small a model.
_CHECK_THE_BOOKS = f"""
        from engine.core.scheduler import Scheduler

        apply = Scheduler.apply

        def apply_and_check(self, *args, **kwargs):
            ended = apply(self, *args, **kwargs)
            self.check()
            return ended

        Scheduler.apply = apply_and_check

        if "{PULL_ALL}" in os.environ:
            import node.flow.pause as pause
            import node.flow.pulls.pull_cost as pull_cost

            pull_cost.PullCost.is_worth = lambda self, *_, **__: True
            pause.FIRST_PAUSE_S = 1.0
"""
AT_START = textwrap.dedent(_ADVERTISE_THE_LINKS + _CHECK_THE_BOOKS)
"""The `sitecustomize` of nodes. Python prints an error in one, and goes on without it."""
ROOMY = ("--kv-cache-memory", "16MiB")
SMALL = (
    *("--kv-cache-memory", "1MiB", "--prefix-host-memory", "512KiB"),
    *("--preemption-mode", "swap", "--swap-space", "512KiB"),
)
"""Two conversations of twelve, and as much again below them, which swapped requests share."""


@dataclass(frozen=True, slots=True)
class Links:
    """The links to one node."""

    control: Link
    kv: Link

    def both(self) -> tuple[Link, Link]:
        return self.control, self.kv


@contextlib.contextmanager
def soak_cluster(
    model: Path,
    redis_server: RedisServer,
    folder: Path,
    memory: Sequence[str] = ROOMY,
    *,
    pulls_all: bool = False,
) -> Iterator[tuple[Cluster, dict[str, Links]]]:
    """The running cluster, whose steps take 50 ms, and the links by node id.

    `memory`: the flags of its nodes' pools. `pulls_all`: whatever another node has is pulled.
    """
    at_start = folder / "at_start"
    at_start.mkdir()
    (at_start / "sitecustomize.py").write_text(AT_START)
    path = os.pathsep.join(filter(None, (str(at_start), os.environ.get("PYTHONPATH", ""))))
    with contextlib.ExitStack() as stack:
        links, nodes = {}, []
        for node_id, role in ROLES.items():
            if role is Role.ROUTER:
                continue
            ports = free_loopback_port(), free_loopback_port()
            link = links[node_id] = Links(Link(ports[0]), Link(ports[1]))
            for one in link.both():
                stack.callback(one.close)
            environ = {"PYTHONPATH": path, CONTROL: link.control.address, KV: link.kv.endpoint}
            environ |= {PULL_ALL: "1"} if pulls_all else {}
            own = ("--port", str(ports[0]), "--kv-port", str(ports[1]))
            nodes.append(NodeSpec(node_id, role, (*own, *_flags(role)), environ))
        spec = ClusterSpec(
            name="soak",
            model=model,
            nodes=tuple(nodes),
            flags=(
                *("--block-size", "16", "--num-threads", "1", *memory),
                *("--kv-transport", "zmq", "--drain-timeout-s", DRAIN_S),
            ),
            routers=(("--drain-timeout-s", "60", "--tool-template", "builtin"),) * 2,
            can_be_slow=True,
        )
        cluster = Cluster(spec, redis_server, folder)
        stack.callback(cluster.close)
        cluster.start()
        cluster.wait_ready()
        yield cluster, links


def _flags(role: Role) -> tuple[str, ...]:
    if role is Role.PREFILL:
        return ("--max-num-batched-tokens", "128")
    return ("--local-prefill-threshold", "16")
