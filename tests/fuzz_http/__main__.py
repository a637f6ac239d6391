"""Fuzz the HTTP port of a real cluster, and check that it goes on as if nothing were.

    python -m tests.fuzz_http [--minutes 2] [--seed 1] [--replay FILE] [--folder DIR]

A router, a prefill node, a decode node and a Redis of its own, on the tests' tiny model. Clients
send requests of every endpoint, valid ones and changed ones, schemas and grammars, odd heads and
framing. Beside them another process asks and measures. The exit status is 1 if a process ended or
grew beyond its bound, an answer was no valid one or failed, something stood still for more than a
second, or something is held at the end. What was sent then is in a file for `--replay`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.nodes import Role
from tests.fuzz_http.answers import Outcome, send
from tests.fuzz_http.bounds import MIB, Processes, closing_faults
from tests.fuzz_http.cases import Case, make_case, read_cases, write_cases
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.cluster.topologies import SMALL_NODES
from tests.support.cluster.watching import Wait, watching
from tests.support.models.tiny_model import make_tiny_model
from tests.support.stores.redis_server import redis_server

NUM_CLIENTS = 4
NUM_WARM_UP = 150
"""Cases before memory is read: the router has started its processes, and caches have begun."""
LONGEST_WAIT_S = 1.0
"""Wait of a request beside, without the time for which other processes had the cores."""
LOOK_EVERY_S = 0.5
MOST_FAULTS = 20
MOST_ALIKE = 2
REQUEST_TIMEOUT_S = "30"
MAX_MODEL_LEN = "1024"
"""An answer that is not cut off takes some seconds."""
KEPT = Path("build/fuzz_http")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_http", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=2.0, help="how long requests are sent")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="send these cases alone")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep the logs here")
    options = parser.parse_args(arguments)
    numbers = itertools.count()
    cases: Iterator[Case] = (make_case(options.seed, number) for number in numbers)
    if options.replay:
        cases = iter(read_cases(options.replay))
    with tempfile.TemporaryDirectory(prefix="pdserve-fuzz-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(options.seed, cases)
        run.run(folder, 60 * options.minutes)
    print(json.dumps(run.figures(), indent=1))
    for fault in run.faults:
        print(fault)
    print(f"--- HTTP fuzzer: {'failed' if run.faults else 'passed'}", flush=True)
    return 1 if run.faults else 0


def fuzz_spec(model: Path) -> ClusterSpec:
    """Return a router, a prefill node and a decode node that prefills short prompts itself."""
    return ClusterSpec(
        name="fuzz",
        model=model,
        nodes=(
            NodeSpec("prefill-1", Role.PREFILL),
            NodeSpec("decode-1", Role.DECODE, ("--local-prefill-threshold", "16")),
        ),
        flags=(
            *SMALL_NODES,
            *("--max-model-len", MAX_MODEL_LEN),
        ),
        routers=(("--request-timeout-s", REQUEST_TIMEOUT_S),),
    )


class Run:
    """One run of the fuzzer: its clients, what they sent, and what was wrong."""

    def __init__(self, seed: int, cases: Iterator[Case]) -> None:
        self._seed = seed
        self._cases = cases
        self._lock = threading.Lock()
        self._sent: dict[int, tuple[Case, Outcome | None]] = {}
        self._is_over = threading.Event()
        self._has_ended = False
        self._counts: Counter[str] = Counter()
        self._statuses: Counter[int] = Counter()
        self._seen: Counter[str] = Counter()
        self._longest_s: dict[str, float] = {}
        self._memory: dict[str, dict[str, float]] = {}
        self.faults: list[str] = []

    def run(self, folder: Path, length_s: float) -> None:
        """Start a cluster, send cases for `length_s`, and look at what is left."""
        model = make_tiny_model(folder / "tiny")
        with (
            redis_server() as store,
            running([fuzz_spec(model)], store, folder) as (cluster,),
        ):
            self._warm_up(cluster)
            with contextlib.closing(Processes(cluster, folder)) as processes:
                self._fuzz(cluster, processes, length_s)
                if self._has_ended:
                    return
                for fault in closing_faults(cluster, processes):
                    num_sent = sum(self._counts.values())
                    self.faults.append(f"{fault}\n  after {num_sent} cases of seed {self._seed}")
                self._look(processes, ())
                self._note_memory(processes)

    def _fuzz(self, cluster: Cluster, processes: Processes, length_s: float) -> None:
        """Send cases until the time or the cases are over, or too much is wrong."""
        with watching(cluster.url, list(processes.pids.values())) as news:
            clients = [
                threading.Thread(target=self._send_all, args=(cluster, number))
                for number in range(NUM_CLIENTS)
            ]
            for client in clients:
                client.start()
            ends_s = time.monotonic() + length_s
            while time.monotonic() < ends_s and any(map(threading.Thread.is_alive, clients)):
                self._look(processes, news())
                if len(self.faults) >= MOST_FAULTS or self._has_ended:
                    break
                self._is_over.wait(LOOK_EVERY_S)
            self._is_over.set()
            for client in clients:
                client.join()
            self._look(processes, news())

    def _warm_up(self, cluster: Cluster) -> None:
        port = _port(cluster)
        for number in range(NUM_WARM_UP):
            send(port, make_case(0, number))

    def _send_all(self, cluster: Cluster, client: int) -> None:
        """Send one case after the other, from an address of this client's own."""
        port, source = _port(cluster), f"127.0.0.{2 + client}"
        while not self._is_over.is_set():
            with self._lock:
                case = next(self._cases, None)
                if case is None:
                    return
                self._sent[case.number] = case, None
            outcome = send(port, case, source)
            with self._lock:
                self._note(case, outcome)

    def _note(self, case: Case, outcome: Outcome) -> None:
        self._counts[case.kind.split()[0]] += 1
        self._statuses.update(answer.status for answer in outcome.answers)
        self._sent[case.number] = case, outcome
        recent = outcome.ended_s - 60.0
        for number in [
            number
            for number, (_, ended) in self._sent.items()
            if ended is not None and ended.ended_s < recent
        ]:
            del self._sent[number]
        if outcome.fault:
            self._add_fault(f"case {case.number} ({case.kind}): {outcome.fault}", [case])

    def _look(self, processes: Processes, waits: Sequence[Wait]) -> None:
        for wait in waits:
            for kind, longest_s in ((wait.kind, wait.took_s), (f"{wait.kind}, own", wait.own_s)):
                self._longest_s[kind] = max(self._longest_s.get(kind, 0.0), longest_s)
            if wait.fault or wait.own_s > LONGEST_WAIT_S:
                queued = f"{wait.queued_s:.2f} s of them without a core"
                what = wait.fault or f"stood still for {wait.took_s:.2f} s, {queued}"
                with self._lock:
                    beside = self._sent_between(wait.began_s, wait.ended_s)
                    self._add_fault(f"the {wait.kind} beside: {what}", beside)
        for fault in processes.faults():
            with self._lock:
                self._add_fault(fault, self._sent_between(time.monotonic() - 5, time.monotonic()))
        self._has_ended = not processes.are_running

    def _sent_between(self, began_s: float, ended_s: float) -> list[Case]:
        return [
            case
            for case, outcome in self._sent.values()
            if outcome is None or (outcome.began_s < ended_s and outcome.ended_s > began_s)
        ]

    def _add_fault(self, what: str, cases: list[Case]) -> None:
        """Note a fault, and keep its cases; of many like it only the first two."""
        key = what.partition("): ")[2][:40] or what[:40]
        self._seen[key.translate(_WITHOUT_DIGITS)] += 1
        if self._seen[key.translate(_WITHOUT_DIGITS)] > MOST_ALIKE:
            return
        KEPT.mkdir(parents=True, exist_ok=True)
        first = cases[0].number if cases else 0
        file = KEPT / f"seed-{self._seed}-case-{first}-fault-{len(self.faults)}.json"
        write_cases(file, self._seed, what, cases)
        self.faults.append(f"{what}\n  seed {self._seed}; make fuzz-http ARGS='--replay {file}'")
        print(self.faults[-1], flush=True)

    def _note_memory(self, processes: Processes) -> None:
        for name, now in processes.held().items():
            self._memory[name] = {
                "at_start_mib": round(processes.at_start[name].resident_bytes / MIB, 1),
                "peak_mib": round(processes.peaks[name] / MIB, 1),
                "at_end_mib": round(now.resident_bytes / MIB, 1),
                "children_at_end_mib": round(sum(now.children.values()) / MIB, 1),
            }
        self._memory["largest child"] = {"peak_mib": round(processes.child_peak / MIB, 1)}

    def figures(self) -> dict[str, object]:
        """Return what was sent, how it was answered, and what it took."""
        return {
            "seed": self._seed,
            "cases": sum(self._counts.values()),
            "by_kind": dict(sorted(self._counts.items())),
            "answers": {str(status): num for status, num in sorted(self._statuses.items())},
            "longest_waits_s": {kind: round(s, 3) for kind, s in sorted(self._longest_s.items())},
            "memory": self._memory,
        }


_WITHOUT_DIGITS = str.maketrans("", "", "0123456789")


def _port(cluster: Cluster) -> int:
    return int(cluster.url.rpartition(":")[2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
