"""Run a real cluster under mixed load and random faults, and check every answer.

    python -m tests.soak [--minutes 5] [--seed 1] [--json FILE] [--folder DIR] [--small-pools]
                         [-- FLAG …]

Two routers, two prefill nodes, two decode nodes and a Redis of its own, on the tests' tiny model.
Every 20 s one fault begins: a process is killed, frozen, cut off, slowed down, drained or
restarted, or the store is. Clients stream, ask for whole answers, leave early and read slowly; they
ask for plain text, schemas, patterns, grammars and tools, and send large bodies. The
exit status is 1 if an answer is wrong, a request fails, or something is held at the end.

With `--small-pools` they have conversations, whose prompts are mostly cached, and the nodes have
host memory for prefixes and pools that hold two conversations of twelve; whatever another node has
is pulled. What is right was computed without any of it. Flags after `--` go to every node, such as
those of further tiers. The exit status is 1 as well if a tier has moved nothing, if the routers do
not know of the same blocks at the end, or of more or less than the nodes hold; and with a
`--prefix-disk` if a file is left that no index names, or that is not whole.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.soak.clients import MAX_TOKENS, Client, Ended, Right, last_answers, right_answers
from tests.soak.cluster import ROLES, ROOMY, SMALL, soak_cluster
from tests.soak.conversations import Turn, following, right_turns
from tests.soak.files import file_complaints, folder_of
from tests.soak.injection import Injector, Undo
from tests.soak.questions import Shape
from tests.soak.report import Done, Held, as_json, held_by, more_held, summary
from tests.soak.schedule import Fault, draw_faults
from tests.soak.tiers import index_complaints, moved, still_complaints, unbalanced
from tests.support.cluster.api import Api
from tests.support.cluster.cluster import Cluster
from tests.support.models.tiny_model import make_tiny_model
from tests.support.stores.redis_server import redis_server

NUM_CLIENTS = 6
EVERY_S = 20.0
LAST_ANSWERS_S = 180.0
MOST_SHOWN = 20


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=5.0, help="how long faults come")
    parser.add_argument("--seed", type=int, default=1, help="of the faults and the clients")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep the logs here")
    parser.add_argument("--small-pools", action="store_true", help="move prefixes between tiers")
    parser.add_argument("flags", nargs="*", help="after --: more flags for every node")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="pdserve-soak-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(folder, options.seed, 60 * options.minutes, options.flags)
        figures, complaints = soak.of_tiers() if options.small_pools else soak.of_shapes()
    text = json.dumps(figures, indent=1)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    for complaint in complaints:
        print(complaint)
    print(f"--- soak: {'failed' if complaints else 'passed'}", flush=True)
    return 1 if complaints else 0


@dataclass(frozen=True, slots=True)
class Soak:
    """One run. Each method returns the figures, and what was not as it must be."""

    folder: Path
    seed: int
    length_s: float
    flags: Sequence[str]

    def of_shapes(self) -> tuple[dict[str, object], list[str]]:
        """Ask for everything that can be asked for."""
        model = make_tiny_model(self.folder / "tiny")
        memory = (*ROOMY, *self.flags)
        with (
            redis_server() as store,
            soak_cluster(model, store, self.folder, memory) as (cluster, links),
        ):
            with Api(cluster.url, "tiny") as api:
                right = right_answers(api, *Shape)
            injector = Injector(cluster, links, store)
            figures, complaints = self._run(cluster, injector, right, {})
        return figures, [*complaints, *unbalanced(self.folder)]

    def of_tiers(self) -> tuple[dict[str, object], list[str]]:
        """Have conversations, with pools that hold few of them."""
        model = make_tiny_model(self.folder / "tiny")
        memory = (*SMALL, *self.flags)
        with redis_server() as store:
            turns = right_turns(model, store, self.folder, max(MAX_TOKENS))
            right: Right = dict(turns.items())
            with soak_cluster(model, store, self.folder, memory, pulls_all=True) as (
                cluster,
                links,
            ):
                injector = Injector(cluster, links, store)
                figures, complaints = self._run(cluster, injector, right, following(turns))
                tiers = moved(cluster)
                complaints += [*still_complaints(tiers), *index_complaints(cluster)]
            disk = folder_of(self.flags)
            if disk is not None:
                last = {name: one.in_own_files for name, one in tiers.items()}
                complaints += file_complaints(disk, last)
        figures["moved"] = {name: asdict(one) for name, one in tiers.items()}
        return figures, [*complaints, *unbalanced(self.folder)]

    def _run(
        self, cluster: Cluster, injector: Injector, right: Right, after: Mapping[Turn, Turn]
    ) -> tuple[dict[str, object], list[str]]:
        at_start = held_by(cluster)
        faults = draw_faults(self.seed, ROLES, until_s=self.length_s, every_s=EVERY_S)
        is_over = threading.Event()
        clients = [
            Client(n, self.seed, cluster.urls, right, is_over, after) for n in range(NUM_CLIENTS)
        ]
        with cluster.slow():
            for client in clients:
                client.start()
            began_s = time.monotonic()
            done = _do_faults(injector, faults, began_s)
            _sleep_until(began_s + self.length_s)
            is_over.set()
        ended = last_answers(clients, LAST_ANSWERS_S)
        injector.heal()
        complaints = _closing_complaints(cluster, at_start)
        figures: dict[str, object] = summary(ended, done)
        figures |= {"at_start": as_json(at_start), "at_end": as_json(held_by(cluster))}
        bad = [one for one in ended if one.failure]
        complaints += [_described(one, done, began_s) for one in bad[:MOST_SHOWN]]
        if not ended:
            complaints.append("no request ended")
        return figures, complaints


def _do_faults(injector: Injector, faults: Sequence[Fault], began_s: float) -> list[Done]:
    """Begin each fault at its time, end it when it has lasted; return them as they were done."""
    done: list[Done] = []
    active: list[tuple[float, Fault, float, Undo]] = []
    waiting = list(faults)
    while waiting or active:
        next_s = min([began_s + waiting[0].at_s] if waiting else [], default=float("inf"))
        ends_s = min((one[0] for one in active), default=float("inf"))
        _sleep_until(min(next_s, ends_s))
        if ends_s <= next_s:
            one = min(active, key=lambda entry: entry[0])
            active.remove(one)
            _, fault, since_s, undo = one
            undo()
            done.append(Done(fault, since_s, time.monotonic()))
            continue
        fault = waiting.pop(0)
        since_s = time.monotonic()
        print(f"{since_s - began_s:6.1f} s  {fault.kind} {fault.target}", flush=True)
        undo = injector.begin(fault)
        active.append((since_s + fault.lasts_s, fault, since_s, undo))
    return done


def _closing_complaints(cluster: Cluster, at_start: dict[str, Held]) -> list[str]:
    complaints = []
    try:
        cluster.check_settled(timeout_s=60.0)
    except AssertionError as error:
        complaints.append(str(error))
    return [*complaints, *more_held(at_start, held_by(cluster))]


def _described(one: Ended, done: Sequence[Done], began_s: float) -> str:
    during = [
        f"{fault.fault.kind} {fault.fault.target}"
        for fault in done
        if fault.began_s < one.ended_s and fault.ended_s > one.began_s - 15
    ]
    return (
        f"{one.kind} {one.shape} "
        f"from {one.began_s - began_s:.1f} s to {one.ended_s - began_s:.1f} s, "
        f"{one.num_tokens} tokens, {len(one.refused)} refused tries, "
        f"during {', '.join(during) or '-'}: "
        f"{one.failure}"
    )


def _sleep_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
