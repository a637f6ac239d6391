"""A real cluster on one card: `python -m tests.gpu.cluster_on_card`.

Redis, routers, a prefill node and decode nodes that share the card, and a mixed node to compare
with, are processes that speak over loopback. Weights are random, of public models' shapes. Phases:

    alone       prefill and decode answer as one mixed node does, token by token
    loaded      the same with all requests at a time
    killed      the same with a decode node killed in the middle of answers
    failed      the same with a decode node's card failing then (on a card only)
    first       times to the first token
    tokens      times between tokens of 1, 8 and 32 streams
    up          how long `pdserve up` takes to its first token, twice

The first four are on a small shape, the others on a large one. Every phase has its own time limit,
and one that fails does not stop the rest. The last line but one is a JSON object, the last one says
how many passed. `--shape tiny --backend numba` runs all of it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdserve.local_cluster.embedded_redis import redis_server_binary
from tests.gpu.cluster.clusters import Clusters
from tests.gpu.cluster.phases import Bits, first_tokens, started, tokens
from tests.gpu.cluster.shapes import LARGE, SMALL, TINY, Shape
from tests.gpu.cluster.timed import Phases
from tests.support.stores.redis_server import RedisServer, redis_server

BITS, FIGURES = ("alone", "loaded", "killed", "failed"), ("first", "tokens")
ALL = (*BITS, *FIGURES, "up")
LIMITS_S = {"alone": 40.0, "loaded": 30.0, "killed": 30.0, "failed": 45.0, "first": 30.0,
            "tokens": 45.0, "up": 150.0, "stop": 20.0, "left": 10.0}  # fmt: skip
_LEFT_MIB = 300
"""Memory of the card that may be in use after the end, beyond what was before."""


class Run:
    """All phases of one run, and what they found."""

    def __init__(self, options: argparse.Namespace, store: RedisServer, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._out: Path | None = options.out
        self._start_s: float = options.start_s
        self._flags = ["--attention-backend", options.backend, *shlex.split(options.node_flags)]
        self.found: dict[str, Any] = {"backend": options.backend, "card": _card("name")}
        self.phases = Phases(options.total_s, self._write)
        self._clusters: list[Clusters] = []
        self._memory_before = _card("memory.used")

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
        self._run("up", lambda: started(shape, self._folder / f"up-{shape.name}", flags))

    def left(self) -> dict[str, Any]:
        """Nothing runs, and the card's memory is free again."""
        pids = [pid for clusters in self._clusters for pid in clusters.left()]
        assert not pids, f"still running: {pids}"
        before, after = self._memory_before, _card("memory.used")
        if before and after:
            assert int(after) - int(before) < _LEFT_MIB, f"MiB of the card: {before}, now {after}"
        return {"card's MiB": [before, after]} if after else {}

    def end(self) -> int:
        """Check that nothing is left, and print the end; return how many phases failed."""
        for clusters in self._clusters:
            clusters.close()
        self._run("left", self.left, is_closing=True)
        if self.phases.failed and self._out:
            words = "\n".join(clusters.last_words() for clusters in self._clusters)
            self._out.with_name("cluster_logs.txt").write_text(words)
        print(json.dumps(self.found))
        print(f"{self.phases.passed} passed, {len(self.phases.failed)} failed")
        return len(self.phases.failed)

    def _start(
        self, name: str, shape: Shape, num_decode: int, *, can_be_slow: bool = False
    ) -> Clusters | None:
        clusters = Clusters(
            name, shape, self._store, self._folder / name, self._flags, num_decode,
            can_be_slow=can_be_slow,
        )  # fmt: skip
        self._clusters.append(clusters)
        if self._run("start", clusters.start):
            return clusters
        clusters.close()
        return None

    def _run(self, name: str, work: Any, *, is_closing: bool = False) -> bool:
        def noted() -> dict[str, Any] | None:
            found: dict[str, Any] | None = work()
            if found:
                self.found[name] = found
            return found

        limit_s = LIMITS_S.get(name, self._start_s)
        return self.phases.run(name, limit_s, noted, is_closing=is_closing)

    def _write(self) -> None:
        if self._out is not None:
            self._out.write_text(json.dumps(self.found | {"failed": self.phases.failed}))


def _card(what: str) -> str | None:
    """Ask NVIDIA's tool for one fact of the first card; None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=10)
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
        "--total-s", type=float, default=180.0, help="seconds until the last phases"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.phases) - set(ALL):
        parser.error(f"no such phase: {', '.join(sorted(unknown))}")
    chosen = options.phases or list(ALL)
    if options.backend != "triton":
        chosen = [name for name in chosen if name != "failed"]
    small, large = (TINY, TINY) if options.shape == "tiny" else (SMALL, LARGE)
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-card-") as folder,
        redis_server(binary=str(redis_server_binary())) as store,
    ):
        run = Run(options, store, Path(folder))
        if bits := [name for name in BITS if name in chosen]:
            run.bits(small, bits)
        if figures := [name for name in FIGURES if name in chosen]:
            run.figures(large, figures)
        if "up" in chosen:
            run.up(large)
        return run.end()


if __name__ == "__main__":
    sys.exit(min(main(), 100))
