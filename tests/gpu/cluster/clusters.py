"""The clusters of one shape on one card: prefill and decode apart, and one mixed node beside."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from common.nodes import Role
from tests.gpu.cluster.shapes import Shape, make_folder
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec
from tests.support.cluster.processes import is_alive
from tests.support.stores.redis_server import RedisServer

_TAIL_LINES = 60


class Clusters:
    """`apart` has a prefill node and `num_decode` decode nodes, `mixed` one node for both."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        store: RedisServer,
        folder: Path,
        flags: Sequence[str],
        num_decode: int,
        *,
        can_be_slow: bool = False,
    ) -> None:
        """Write the model into `folder`, which is made; nothing runs. `name` is for the store."""
        self.shape = shape
        self.model = shape.name
        flags = ("--load-format", "random", *shape.flags, *flags)
        model = make_folder(folder / shape.name, shape)
        decode = [NodeSpec(f"decode-{n}", Role.DECODE) for n in range(1, num_decode + 1)]
        apart = (NodeSpec("prefill-1", Role.PREFILL), *decode)
        self.apart, self.mixed = (
            Cluster(
                ClusterSpec(name=f"{name}_{kind}", model=model, nodes=nodes,
                            flags=flags, routers=(("--served-model-name", shape.name),),
                            can_be_slow=can_be_slow),
                store, folder,
            )
            for kind, nodes in (
                ("apart", apart), ("mixed", (NodeSpec("mixed-1", Role.MIXED),)),
            )
        )  # fmt: skip
        self._pids: set[int] = set()

    @property
    def both(self) -> tuple[Cluster, Cluster]:
        """Prefill and decode apart first."""
        return self.apart, self.mixed

    def start(self) -> None:
        """Start all processes at once, and return when all serve; else none is left."""
        try:
            for cluster in self.both:
                cluster.start()
            for cluster in self.both:
                cluster.wait_ready()
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        """End all that runs as Ctrl-C does. Raises `AssertionError` for a process that failed."""
        try:
            running = [
                process
                for cluster in self.both
                for process in cluster.processes.values()
                if process.is_running
            ]
            for process in running:
                self._pids |= {process.pid, *process.children()}
            codes = {process.name: process.interrupt() for process in running}
        finally:
            self.close()
        assert not any(codes.values()), f"exit codes: {codes}"

    def close(self) -> None:
        """End whatever still runs, of both, whatever is wrong with one of them."""
        with ExitStack() as ends:
            for cluster in self.both:
                ends.callback(cluster.close)

    def left(self) -> list[int]:
        """The processes that are still there."""
        return [pid for pid in self._pids if is_alive(pid)]

    def last_words(self) -> str:
        """The ends of all logs."""
        return "\n".join(
            f"===== {cluster.spec.name} {name}\n"
            + "\n".join(process.log().splitlines()[-_TAIL_LINES:])
            for cluster in self.both
            for name, process in cluster.processes.items()
        )
