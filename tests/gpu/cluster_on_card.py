"""A real cluster on one card: `python -m tests.gpu.cluster_on_card`.

Redis, routers, a prefill node and decode nodes that share the card, and a mixed node to compare
with, are processes that speak over loopback. Weights are random, of public models' shapes. Phases:

    alone       prefill and decode answer as one mixed node does, token by token
    loaded      the same with all requests at a time
    killed      the same with a decode node killed in the middle of answers
    lost        the same with a decode node's card failing then (on a card only)
    first       times to the first token
    tokens      times between tokens of 1, 8 and 32 streams, and of 128 where they fit
    up          how long `pdserve up` takes to its first token, twice

The first four are on a small shape, the others on a large one. Every phase has its own time limit,
and one that fails does not stop the rest. The last line but one is a JSON object, the last one says
how many passed. `--shape tiny --backend numba` runs all of it on a CPU.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pdserve.local_cluster.embedded_redis import redis_server_binary
from tests.gpu.cluster.clusters import Clusters
from tests.gpu.cluster.phases import Bits, first_tokens, started, tokens
from tests.gpu.cluster.shapes import LARGE, SMALL, TINY, WIDE, WIDE_CARD_MIB, Shape
from tests.gpu.timed import Phases
from tests.support.stores.redis_server import RedisServer, redis_server

BITS, FIGURES = ("alone", "loaded", "killed", "lost"), ("first", "tokens")
ALL = (*BITS, *FIGURES, "up")
LIMITS_S = {"alone": 40.0, "loaded": 30.0, "killed": 30.0, "lost": 45.0, "first": 30.0,
            "tokens": 90.0, "up": 150.0, "stop": 20.0, "left": 10.0}  # fmt: skip
_LEFT_MIB = 300
"""Memory of the card that may be in use after the end, beyond what was before."""


class Run:
    """All phases of one run, and what they found."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Start nothing."""
        self._out: Path | None = options.out
        self._start_s: float = options.start_s
        self._flags = ["--attention-backend", options.backend, *shlex.split(options.node_flags)]
        self.found: dict[str, Any] = {"backend": options.backend, "card": _card("name")}
        self.phases = Phases(options.total_s, self.found, self._out)
        self._held = ExitStack()
        """The model's folder and the store."""
        self._folder = Path()
        self._store: RedisServer | None = None
        self._clusters: list[Clusters] = []
        self._words = ""
        self._memory_before = _card("memory.used")

    def all(self, chosen: Sequence[str], small: Shape, large: Shape) -> None:
        """Run the chosen phases. Every error is one of a phase."""
        if bits := [name for name in BITS if name in chosen]:
            self.bits(small, bits)
        if figures := [name for name in FIGURES if name in chosen]:
            self.figures(large, figures)
        if "up" in chosen:
            self.up(large)

    def bits(self, shape: Shape, names: Sequence[str]) -> None:
        """Compare answers."""
        if clusters := self._start("bits", shape, num_decode=3, can_be_slow=True):
            bits = Bits(clusters, [])
            for name in names:
                self._run(name, getattr(bits, name))
            self._run("stop", clusters.stop, is_closing=True)

    def figures(self, shape: Shape, names: Sequence[str]) -> None:
        """Measure."""
        if clusters := self._start("figures", shape, num_decode=1):
            for name in names:
                work = {"first": first_tokens, "tokens": tokens}[name]
                self._run(name, lambda work=work: work(clusters))
            self._run("stop", clusters.stop, is_closing=True)

    def up(self, shape: Shape) -> None:
        """Start `pdserve up`, on a card by the flag for that."""
        flags = ["--gpus", "0"] if self.found["backend"] == "triton" else self._flags
        self._run("up", lambda: started(shape, self._own_folder() / f"up-{shape.name}", flags))

    def left(self) -> dict[str, Any]:
        """Close everything: nothing runs, and the card's memory is free again."""
        with ExitStack() as ends:
            ends.callback(self._held.close)
            ends.callback(self._keep_words)
            for clusters in self._clusters:
                ends.callback(clusters.close)
        pids = [pid for clusters in self._clusters for pid in clusters.left()]
        assert not pids, f"still running: {pids}"
        before, after = self._memory_before, _card("memory.used")
        if before and after:
            assert int(after) - int(before) < _LEFT_MIB, f"MiB of the card: {before}, now {after}"
        return {"card's MiB": [before, after]} if after else {}

    def end(self) -> int:
        """Check that nothing is left, and print the end; return how many phases failed."""
        self._run("left", self.left, is_closing=True)
        if self.phases.failed and self._out and self._words:
            try:
                self._out.with_name("cluster_logs.txt").write_text(self._words)
            except OSError as error:
                print(f"the logs cannot be written: {error}", flush=True)
        return self.phases.end()

    def _keep_words(self) -> None:
        """Read the ends of all logs, which are in the folder."""
        self._words = "\n".join(clusters.last_words() for clusters in self._clusters)

    def _own_folder(self) -> Path:
        """The folder of this run, made when it is first needed."""
        if self._folder == Path():
            made = TemporaryDirectory(prefix="pdserve-card-")
            self._folder = Path(self._held.enter_context(made))
        return self._folder

    def _own_store(self) -> RedisServer:
        """The store of all clusters, started when it is first needed."""
        if self._store is None:
            server = redis_server(binary=str(redis_server_binary()))
            self._store = self._held.enter_context(server)
        return self._store

    def _start(
        self, name: str, shape: Shape, num_decode: int, *, can_be_slow: bool = False
    ) -> Clusters | None:
        serving: list[Clusters] = []

        def start() -> None:
            clusters = Clusters(
                name, shape, self._own_store(), self._own_folder() / name, self._flags,
                num_decode, can_be_slow=can_be_slow,
            )  # fmt: skip
            self._clusters.append(clusters)
            clusters.start()
            serving.append(clusters)

        return serving[0] if self._run("start", start) else None

    def _run(self, name: str, work: Any, *, is_closing: bool = False) -> bool:
        def noted() -> dict[str, Any] | None:
            found: dict[str, Any] | None = work()
            if found:
                self.found[name] = found
            return found

        limit_s = LIMITS_S.get(name, self._start_s)
        return self.phases.run(name, limit_s, noted, is_closing=is_closing)


def _card(what: str) -> str | None:
    """Ask NVIDIA's tool for one fact of the first card; None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=10)
    except subprocess.TimeoutExpired:  # as where a driver hangs
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen phases; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("phases", nargs="*", help=f"of {', '.join(ALL)} (default: all)")
    parser.add_argument("--backend", default="triton", help="attention_backend of the nodes")
    parser.add_argument("--shape", choices=("card", "tiny"), default="card")
    parser.add_argument("--out", type=Path, help="a file for the JSON; logs go beside it")
    parser.add_argument("--node-flags", default="", help="further flags of all nodes, in one text")
    parser.add_argument("--start-s", type=float, default=90.0, help="seconds for each start")
    parser.add_argument(
        "--total-s", type=float, default=240.0, help="seconds until the last phases"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.phases) - set(ALL):
        parser.error(f"no such phase: {', '.join(sorted(unknown))}")
    chosen = options.phases or list(ALL)
    if options.backend != "triton":
        chosen = [name for name in chosen if name != "lost"]
    has_room = int(_card("memory.total") or 0) >= WIDE_CARD_MIB
    small, large = (TINY, TINY) if options.shape == "tiny" else (SMALL, WIDE if has_room else LARGE)
    run = Run(options)
    with run.phases.interruptible():
        run.all(chosen, small, large)
        return run.end()


if __name__ == "__main__":
    sys.exit(min(main(), 100))
