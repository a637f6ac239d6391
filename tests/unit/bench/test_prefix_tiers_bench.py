"""The figures of bench.prefix_tiers: each prompt is computed, then in the pool, then kept.

Then another node has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from bench.prefix_tiers import from_files, pulled
from bench.prefix_tiers.in_one_engine import DiskTier, measure
from bench.running_cluster import Answer, RunningCluster
from common.observing.latency import RequestTiming
from engine.core.blocks.disk_index import DiskIndex
from engine.core.scheduler import Scheduler
from engine.prefix_disk.block_folder import BlockFolder
from tests.support.engine.build import STRICT, Engine, make_request

NUM_TOKENS = 16


class Played:
    """An engine without a model, in which a token takes a second."""

    def __init__(self, folder: Path) -> None:
        self._engine = Engine(
            num_blocks=NUM_TOKENS // 4 + 2,
            seats=1,
            num_host_blocks=64,
            keeps_prefixes=True,
            disk_index=DiskIndex(1 << 30, 1000),
            **STRICT,
        )
        self.scheduler: Scheduler = self._engine.scheduler
        runner = self._engine.runner
        fingerprint, host_kv = runner.layout.fingerprint, runner.host_kv
        self._disk = DiskTier(self.scheduler, BlockFolder(folder, fingerprint, host_kv))
        self.forget_host = self._disk.forget_host

    def first_token_s(self, prompt: list[int]) -> float:
        num_before = self.scheduler.statistics().counters.num_chunk_tokens
        request = make_request(tuple(token % 990 for token in prompt), max_tokens=1)
        self._disk.fetch(self._engine.add(request))
        self._engine.run()
        num_after = self.scheduler.statistics().counters.num_chunk_tokens
        for _ in range(3):
            self._engine.step()
            self._disk.save()
        return num_after - num_before


def test_what_is_cached_or_kept_is_not_computed(tmp_path: Path) -> None:
    figures = measure(Played(tmp_path / "d"), NUM_TOKENS, 3)
    assert figures.pop("copied_mb") > 0
    assert figures == {
        "computed_ms": 1000.0 * (NUM_TOKENS + 1),
        "pool_ms": 1000.0,
        "host_ms": 1000.0,
        "disk_ms": 1000.0,
        "host_tokens": NUM_TOKENS - 4,
        "disk_tokens": NUM_TOKENS - 4,
    }


class TwoNodes:
    """Nodes that take turns. The router knows what one has computed a look later."""

    def __init__(self, *, pulls: bool = True, lane: str = "shm") -> None:
        self._pulls, self._lane = pulls, lane
        self._asked: list[tuple[int, ...]] = []
        self._known: set[tuple[int, ...]] = set()
        self._num_heartbeats = 0
        self.num_pulled = 0

    async def answer(self, body: Mapping[str, Any]) -> Answer:
        start = tuple(body["prompt"][:-1])
        is_pulled = self._pulls and start in self._known
        self._asked.append(start)
        at_s = 1.25 if is_pulled else 5.0
        return Answer(
            timing=RequestTiming(arrived_at_s=1.0, chunk_at_s=(at_s,), num_tokens=1),
            token_ids=(7,),
            num_prompt_tokens=len(start) + 1,
            num_cached_tokens=len(start) if is_pulled else 0,
        )

    async def metric(self, name: str) -> float:
        assert name == "pdserve_router_known_blocks"
        num_known = len(self._known)
        self._known.update(self._asked)
        return 32.0 * num_known

    async def nodes(self) -> dict[str, dict[str, Any]]:
        """What heartbeats say, of which the first is older than the pulls."""
        self._num_heartbeats += 1
        told = {"num_prefix_disk_blocks": 32 * self._num_heartbeats}
        links = [
            {"transport": "zmq", "num_bytes": 0},
            {"transport": self._lane, "num_bytes": (self._num_heartbeats > 1) << 20},
        ]
        return {
            "mixed-1": {"kv_links": links, **told},
            "mixed-2": {"kv_links": [], "num_prefix_disk_blocks": 0},
        }


def two_nodes(**given: Any) -> RunningCluster:
    return cast(RunningCluster, TwoNodes(**given))


async def test_a_prompt_is_asked_of_one_node_and_then_of_the_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulled, "POLL_S", 0.0)
    computed, from_other = await pulled.ask_in_turns(two_nodes(), 2048, 3)
    assert computed == [4000.0] * 3
    assert from_other == [250.0] * 3


async def test_a_prompt_that_was_not_pulled_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulled, "POLL_S", 0.0)
    with pytest.raises(RuntimeError, match="0 tokens were cached, wanted 2048"):
        await pulled.ask_in_turns(two_nodes(pulls=False), 2048, 3)


async def test_kv_that_took_another_way_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulled, "POLL_S", 0.0)
    await pulled.check_lane(two_nodes(), "shm")
    with pytest.raises(RuntimeError, match=r"KV went over \['zmq'\], wanted shm"):
        await pulled.check_lane(two_nodes(lane="zmq"), "shm")


class FirstHasFiles(TwoNodes):
    """The first node has in its pool what it was asked last; the other one pulls what it was."""

    async def answer(self, body: Mapping[str, Any]) -> Answer:
        start = tuple(body["prompt"][:-1])
        is_here = len(self._asked) % 2 == 0
        self._asked.append(start)
        is_cached = start in self._asked[:-1] and len(start) > 64
        self.num_pulled += is_cached and not is_here
        at_s = 1.1 if is_cached and is_here else 1.25 if is_cached else 5.0
        return Answer(
            timing=RequestTiming(arrived_at_s=1.0, chunk_at_s=(at_s,), num_tokens=1),
            token_ids=(7,),
            num_prompt_tokens=len(start) + 1,
            num_cached_tokens=len(start) if is_cached else 0,
        )


async def test_what_the_first_node_has_used_twice_and_evicted_is_asked_of_the_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(from_files, "POLL_S", 0.0)
    nodes = FirstHasFiles()
    computed, from_other = await from_files.ask_in_turns(cast(RunningCluster, nodes), 2048, 2)
    assert computed == [4000.0] * 2
    assert from_other == [250.0] * 2
    assert nodes.num_pulled == 2


def test_blocks_that_came_out_of_memory_are_no_figure(tmp_path: Path) -> None:
    told = tmp_path / "sent"
    with pytest.raises(RuntimeError, match="0 blocks came out of files, wanted 32"):
        from_files.check_sent(told, 32)
    told.write_text("32\n31\n")
    from_files.check_sent(told, 63)
    with pytest.raises(RuntimeError, match="63 blocks came out of files, wanted 64"):
        from_files.check_sent(told, 64)
