"""Upgrade a real cluster from the previous release to this one under load, and check every answer.

    python -m tests.upgrade [--json FILE] [--folder DIR]

Two routers, two prefill nodes and two decode nodes of the previous release, on a Redis of their own
and the tests' tiny model. Clients stream all the time. Each process is replaced by one of this
release, in the order of docs/operations.md; then one of each kind is replaced by the previous
release again; then one prefill and one decode node get another KV layout. The exit status is 1 if a
request fails, an answer differs, a combination of both releases did not work together, or a pair of
nodes that cannot exchange KV was chosen.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.version import OLDEST_PROTOCOL_VERSION
from tests.soak.clients import Client, last_answers, right_answers
from tests.soak.questions import Shape
from tests.support.cluster.api import Api
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.processes import SOURCES
from tests.support.models.tiny_model import make_tiny_model
from tests.support.stores.redis_server import redis_server
from tests.upgrade.release import PREVIOUS, NotInHistory, previous_sources
from tests.upgrade.report import complaints, summary
from tests.upgrade.rollout import (
    RELAID,
    ROLLED_BACK,
    UPGRADED,
    Rollout,
    compile_kernels,
    spec_of,
)
from tests.upgrade.watch import Watch

NUM_CLIENTS = 6
SEED = 1
LAST_ANSWERS_S = 90.0
MOST_SHOWN = 20


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep the logs here")
    options = parser.parse_args(arguments)
    try:
        previous = previous_sources()
    except NotInHistory as error:
        print(
            f"skipped: this checkout's history has no commit {PREVIOUS[:7]}, the previous "
            f"release: {error}"
        )
        return 0
    with tempfile.TemporaryDirectory(prefix="pdserve-upgrade-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures, found = upgrade(folder, previous)
    text = json.dumps(figures, indent=1)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    for complaint in found[:MOST_SHOWN]:
        print(complaint)
    print(f"--- upgrade: {'failed' if found else 'passed'}", flush=True)
    return 1 if found else 0


def upgrade(folder: Path, previous: Path) -> tuple[dict[str, Any], list[str]]:
    """Run it. Return the figures, and what was not as it must be."""
    model = make_tiny_model(folder / "tiny")
    with redis_server() as store:
        compile_kernels(model, (previous, SOURCES), store, folder)
        cluster = Cluster(spec_of(model), store, folder)
        try:
            cluster.start(previous)
            cluster.wait_ready()
            return _under_load(cluster, previous)
        finally:
            cluster.close()


def _under_load(cluster: Cluster, previous: Path) -> tuple[dict[str, Any], list[str]]:
    found = [
        f"{node.record.node_id} has protocol {node.record.protocol}, and the previous one is "
        f"{OLDEST_PROTOCOL_VERSION}: {PREVIOUS[:7]} is not the previous release"
        for node in cluster.live_nodes()
        if node.record.protocol != OLDEST_PROTOCOL_VERSION
    ]
    with Api(cluster.url, "tiny") as api:
        right = right_answers(api, Shape.PLAIN)
    is_over = threading.Event()
    clients = [Client(n, SEED, cluster.urls, right, is_over) for n in range(NUM_CLIENTS)]
    watch = Watch(cluster)
    watch.start()
    rollout = Rollout(cluster, watch)
    with cluster.slow():
        for client in clients:
            client.start()
        rollout.replace(UPGRADED, "this", SOURCES)
        rollout.replace(ROLLED_BACK, "the previous", previous)
        rollout.wait_for_mixed_pairs()
        rollout.relay(RELAID, "this", SOURCES)
        is_over.set()
    ended = last_answers(clients, LAST_ANSWERS_S)
    watch.end()
    rollout.close()
    cluster.wait_ready()  # The books of the nodes' present lives.
    try:
        cluster.check_settled()
    except AssertionError as error:
        found.append(str(error))
    found += watch.ask(lambda seen: complaints(ended, rollout.done, seen))
    return watch.ask(lambda seen: summary(ended, rollout.done, seen)), found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
