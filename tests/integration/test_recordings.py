"""Real processes record what they are told and what they decide; a replay decides the same.

The replay is in another process, where sets have another order.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.nodes import Role
from router.core.placement import Placer
from simulator.replays.replay import replay_recording
from tests.support.cluster.api import Api
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.models.tiny_model import prompt_tokens
from tests.support.stores.redis_server import RedisServer

NUM_REQUESTS = 40
NUM_BEGINNINGS = 4
SECRET_SALT = "a-salt-that-nobody-should-read"
PREFILL, DECODE = ("prefill-1", "prefill-2"), ("decode-1", "decode-2")
ALL = ("router-1", *PREFILL, *DECODE)


@dataclass(frozen=True, slots=True)
class Recordings:
    """The files of a cluster that was asked and has ended, by the name of the process."""

    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path(name).read_text().splitlines()]

    def plans(self, name: str) -> list[dict[str, Any]]:
        """What each step of a node was planned to compute."""
        lines = self.lines(name)
        return [line["gave"]["plan"] for line in lines if line.get("call") == "begin_step"]

    def num_placed(self) -> int:
        return sum(line.get("call") == "choose" for line in self.lines("router-1"))


def ask(cluster: Cluster) -> None:
    """A burst with shared beginnings and sessions, and one client that leaves in the middle."""
    left = threading.Event()

    def leave(api: Api) -> None:
        with api.stream(prompt=prompt_tokens(70), max_tokens=900, ignore_eos=True) as stream:
            stream.read_tokens(3)
        left.set()

    def complete(api: Api, number: int) -> None:
        beginning = prompt_tokens(96, salt=number % NUM_BEGINNINGS)
        prompt = [*beginning, *prompt_tokens(20 + 3 * number, salt=100 + number)]
        api.complete(
            prompt,
            max_tokens=4 + number % 9,
            seed=number,
            user=f"user-{number % 7}",
            cache_salt=SECRET_SALT if number % 5 == 0 else None,
        )

    with Api(cluster.url, "tiny") as api, ThreadPoolExecutor(16) as threads:
        leaving = threads.submit(leave, api)
        asked = [threads.submit(complete, api, number) for number in range(NUM_REQUESTS)]
        for one in (leaving, *asked):
            one.result()
    assert left.is_set()


@pytest.fixture(scope="module")
def recordings(cluster_redis: RedisServer, cluster_folder: Path, tiny_model: Path) -> Recordings:
    folder = cluster_folder / "recordings"
    record = ("--record", str(folder))
    steps = ("--max-num-batched-tokens", "64", "--local-prefill-threshold", "16")
    spec = ClusterSpec(
        name="recorded",
        model=tiny_model,
        nodes=(
            *(NodeSpec(name, Role.PREFILL) for name in PREFILL),
            *(NodeSpec(name, Role.DECODE, ("--kv-cache-memory", "1MiB")) for name in DECODE),
        ),
        flags=("--block-size", "16", "--num-threads", "1", "--max-num-seqs", "8", *steps, *record),
        routers=(record,),
    )
    with running([spec], cluster_redis, cluster_folder) as (cluster,):
        ask(cluster)
        cluster.check_settled()
        assert [cluster.processes[name].stop() for name in ALL] == [0] * len(ALL)
    return Recordings(folder)


def test_a_router_places_again_as_it_did(recordings: Recordings) -> None:
    replayed = replay_recording(recordings.path("router-1"))
    assert replayed.difference is None
    assert replayed.num_decisions == recordings.num_placed() > NUM_REQUESTS


@pytest.mark.parametrize("name", [*PREFILL, *DECODE])
def test_a_node_plans_again_as_it_did(recordings: Recordings, name: str) -> None:
    replayed = replay_recording(recordings.path(name))
    assert replayed.difference is None
    planned = recordings.plans(name)
    assert replayed.num_decisions == len(planned)


def test_the_plans_of_all_nodes_are_those_of_all_prompts(recordings: Recordings) -> None:
    """How many each node makes is chance; together the prompts' own ends fill 49 steps."""
    planned = [plan for name in (*PREFILL, *DECODE) for plan in recordings.plans(name)]
    assert sum("ids" in plan for plan in planned) > NUM_REQUESTS


def test_a_placement_that_was_changed_is_found(recordings: Recordings, tmp_path: Path) -> None:
    lines = recordings.lines("router-1")
    placed = [line for line in lines if line.get("call") == "choose"]
    decode = placed[NUM_REQUESTS // 2]["gave"][0]["decode"]
    decode["node_id"] = "decode-1" if decode["node_id"] == "decode-2" else "decode-2"
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    replayed = replay_recording(changed)
    assert replayed.difference is not None
    assert replayed.difference.line == 1 + lines.index(placed[NUM_REQUESTS // 2])
    assert replayed.num_decisions == NUM_REQUESTS // 2 + 1


def test_placement_that_forgets_what_nodes_hold_is_found(
    recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Placer, "on_blocks", lambda self, node, report: 0)
    monkeypatch.setattr("router.core.known.block_index.BlockIndex.expect", lambda *_: None)
    replayed = replay_recording(recordings.path("router-1"))
    assert replayed.difference is not None
    assert replayed.difference.what == "chooser.choose"


def test_no_text_and_no_secret_is_recorded(recordings: Recordings) -> None:
    for name in ALL:
        written = recordings.path(name).read_text()
        assert SECRET_SALT not in written
        assert "user-3" not in written
        assert recordings.path(name).stat().st_mode & 0o777 == 0o600
