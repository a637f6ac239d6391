"""A source reads what is on its disk alone, and sends it out of host memory.

The disk is real files under calls that fail. Whatever it does costs the pull and nothing else.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from common.ids import Incarnation
from common.kv.blocks import hash_full_blocks
from common.kv.prefix_source import PrefixSource
from engine.core.blocks.block_pool import BlockUse
from engine.core.blocks.disk_jobs import DiskRead
from node.flow.messages import SendBlocks
from node.flow.pause import FIRST_PAUSE_S
from node.flow.pulls import pull_cost
from tests.simulation.scripted_node import BLOCK_SIZE, LEASE_S, NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.small_source import NUM_SHARED, OTHER, SmallSource
from tests.simulation.world import PREFILL, assert_finished
from tests.support.disk.faulty_files import sometimes
from tests.support.disk.played_disk import PlayedDisk
from tests.support.engine.build import make_prompt
from tests.support.examples import everyday
from tests.support.nodes.timed_pulls import on_pulled

SHARED = make_prompt(NUM_SHARED * BLOCK_SIZE, 0)
WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 7}]


class Stored(SmallSource):
    """`p` has the shared prompt in files, and no room for it above them; `q` is asked next."""

    def __init__(self, path: Path, *, num_host_blocks: int = 8, **given: Any) -> None:
        path.mkdir(exist_ok=True)
        size = {"num_host_blocks": num_host_blocks, "disk_path": path / "prefixes"}
        super().__init__(SHARED, size, **given)
        self.path = path
        fingerprint = self.p.runner.layout.fingerprint
        self.shared = hash_full_blocks(SHARED, BLOCK_SIZE, fingerprint)
        self.settle()
        for family in range(6):
            for last in (1, 2):
                self._ask_p((*make_prompt(len(SHARED), family), last))
        assert self.in_pool() == self.in_host() == 0
        assert len(self.files()) == NUM_SHARED
        self.router.prefill = OTHER
        self.router.source = PrefixSource(PREFILL, len(SHARED), len(SHARED))

    def _ask_p(self, prompt: tuple[int, ...]) -> None:
        self.router.prefill, self.router.source = PREFILL, None
        assert_finished(self, self.ask(prompt, max_tokens=3, ignore_eos=True, may_wait=True))

    def have_in_pool(self, num_blocks: int) -> None:
        """Have `p` read so many blocks for itself."""
        self._ask_p((*SHARED[: num_blocks * BLOCK_SIZE], 1))
        assert self.in_pool() == num_blocks
        self.router.prefill = OTHER
        self.router.source = PrefixSource(PREFILL, len(SHARED))

    @property
    def disk(self) -> PlayedDisk:
        assert self.p.disk is not None
        return self.p.disk

    def files(self) -> list[Path]:
        """The files of the shared prompt."""
        return [
            found
            for one in self.shared
            for found in (self.path / "prefixes").glob(f"node-*/*/{one.hex()}.kv")
        ]

    def in_host(self) -> int:
        return sum(self.p.scheduler.host_pool.find(one) is not None for one in self.shared)

    def ask_q_of_a_stuck_disk(self) -> Asked:
        """`q` is asked, and waits for a source whose disk does nothing."""
        self.disk.is_stuck = True
        asked = self.ask_q()
        self.step_until(lambda: self.p.scheduler.disk_prefixes.num_read_into > 0)
        self.settle()
        assert not asked.is_done
        return asked

    def go_on(self, by_s: float = 0.0) -> None:
        """The disk works again, and so much time passes."""
        self.disk.is_stuck = False
        self.advance(by_s)
        self.settle()

    def events(self) -> dict[str, int]:
        """What the disk of `p` has done."""
        return self.p.scheduler.statistics().counters.disk

    def num_reads(self) -> int:
        return sum(isinstance(job, DiskRead) for job in self.disk.done)


@pytest.mark.parametrize("way", WAYS)
def test_blocks_that_are_on_disk_alone_are_read_and_sent(
    way: dict[str, Any], tmp_path: Path
) -> None:
    world = Stored(tmp_path)
    num_evictions = world.p.scheduler.pool.num_evicted
    assert_finished(world, world.ask_q(**way))
    assert world.q.pulls() == {"landed": 1}
    assert world.q.num_computed() == 1
    assert world.p.sent() == {"pool": 0, "host": 0, "disk": NUM_SHARED}
    assert (world.in_pool(), world.in_host()) == (0, NUM_SHARED)
    assert world.p.scheduler.pool.num_evicted == num_evictions, "the pool takes no part"
    assert world.p.scheduler.host_pool.num_read == 0


@pytest.mark.parametrize("num_in_pool", [1, 2, 3])
def test_one_transfer_has_blocks_of_all_tiers(num_in_pool: int, tmp_path: Path) -> None:
    world = Stored(tmp_path)
    world.have_in_pool(num_in_pool)
    assert_finished(world, world.ask_q())
    assert world.q.pulls() == {"landed": 1}
    assert world.p.sent() == {"pool": num_in_pool, "host": 0, "disk": NUM_SHARED - num_in_pool}


def test_what_is_in_memory_is_kept_while_the_rest_is_read(tmp_path: Path) -> None:
    world = Stored(tmp_path)
    world.have_in_pool(2)
    asked = world.ask_q_of_a_stuck_disk()
    pool, host_pool = world.p.scheduler.pool, world.p.scheduler.host_pool
    pool.evict_next([pool.prefix_cache.find(one) or 0 for one in world.shared[:2]])
    pool.release(pool.allocate(pool.num_available, BlockUse.RUNNING))
    host_pool.release(host_pool.allocate(host_pool.num_available))
    assert world.in_pool() == 2
    world.go_on()
    assert_finished(world, asked)
    assert world.q.pulls() == {"landed": 1}
    assert host_pool.num_read == 0


def test_two_pulls_of_the_same_blocks_wait_for_one_read(tmp_path: Path) -> None:
    world = Stored(tmp_path)
    third = world.join(Incarnation("q2", 1), NodeSize(num_blocks=24, max_model_len=28))
    first = world.ask_q_of_a_stuck_disk()
    world.router.prefill = third.me
    second = world.ask_q(last=11)
    world.step_until(lambda: len(world.p.connector.transfers) == 2)
    num_reads = world.num_reads()
    world.go_on()
    assert_finished(world, first, second)
    assert world.num_reads() == num_reads + 1
    assert world.p.sent()["disk"] == 2 * NUM_SHARED
    assert third.scheduler.statistics().counters.pulls["landed"] == 1


def test_a_pull_and_a_prompt_of_the_source_wait_for_one_read(tmp_path: Path) -> None:
    world = Stored(tmp_path)
    first = world.ask_q_of_a_stuck_disk()
    world.router.prefill = PREFILL
    second = world.ask_q(last=11)
    world.settle()
    num_reads = world.num_reads()
    world.go_on()
    assert_finished(world, first, second)
    assert world.num_reads() == num_reads + 1
    assert world.q.pulls() == {"landed": 1}
    found = world.p.scheduler.statistics().counters.prefix_blocks_found
    assert found["disk"] == NUM_SHARED


def test_a_disk_that_hangs_is_waited_for_no_longer_than_computing_takes(tmp_path: Path) -> None:
    world = Stored(tmp_path)
    world.token_s = 0.25
    asked = world.ask_q_of_a_stuck_disk()
    assert world.p.flow.snapshot().load.num_waiting == 0, "no prompt of its own waits"
    world.advance(len(SHARED) * world.token_s - 0.5)
    world.settle()
    assert not asked.is_done
    world.advance(0.5)
    world.settle()
    assert asked.outcomes == ["finished"]
    assert world.q.pulls() == {"missed": 1}
    assert world.events()["late"] == NUM_SHARED
    assert not world.p.flow.sends
    assert world.p.scheduler.host_pool.num_read == 0
    again = world.ask_q(last=10)  # the receiver has it now; nothing else is read meanwhile
    world.settle()
    assert again.outcomes == ["finished"]
    world.go_on(2 * FIRST_PAUSE_S)
    world.check_closed()
    assert world.in_host() == NUM_SHARED, "what comes late is there for others"


@pytest.mark.parametrize("how", ["bit", "cut", "longer", "other", "empty", "gone"])
@pytest.mark.parametrize("which", [0, NUM_SHARED - 1])
def test_a_file_that_is_not_what_was_written_costs_its_block_and_those_behind(
    how: str, which: int, tmp_path: Path
) -> None:
    world = Stored(tmp_path)
    path = world.files()[which]
    content = path.read_bytes()
    changed = {
        "bit": bytes([*content[:-9], content[-9] ^ 1, *content[-8:]]),
        "cut": content[: len(content) // 2],
        "longer": content + b"x",
        "other": world.files()[which - 1].read_bytes(),
        "empty": b"",
    }
    path.unlink() if how == "gone" else path.write_bytes(changed[how])
    assert_finished(world, world.ask_q())
    assert world.q.pulls() == ({"landed": 1, "missed": 1} if which else {"missed": 1})
    assert world.events()["vanished" if how == "gone" else "corrupt"] == 1
    assert world.p.sent() == {"pool": 0, "host": 0, "disk": which}
    assert world.in_host() == which, "what was read before it is there"


@pytest.mark.parametrize("name", ["open_old", "read", "close"])
def test_a_disk_that_gives_errors_costs_one_pull_and_is_left_alone(
    name: str, tmp_path: Path
) -> None:
    world = Stored(tmp_path)
    world.p.calls.fault = lambda called: errno.EIO if called == name else None
    assert_finished(world, world.ask_q())
    assert world.q.pulls() == {"missed": 1}
    num_calls = world.p.calls.num_calls
    other = (*make_prompt(len(SHARED), 1), 9)
    assert_finished(world, world.ask(other, max_tokens=3, may_wait=True))
    assert world.q.pulls() == {"missed": 2}
    assert world.p.calls.num_calls == num_calls, "tried again at once"
    assert world.events()["declined"] == NUM_SHARED


def test_where_the_source_would_compute_sooner_than_read_it_refuses(tmp_path: Path) -> None:
    world = Stored(tmp_path)
    asked = world.ask_q()
    world.step_until(
        lambda: any(isinstance(message, SendBlocks) for _, message in world.to_nodes), frames=False
    )
    num_reads = world.num_reads()
    world.token_s = 1e-6
    assert_finished(world, asked)
    assert world.q.pulls() == {"missed": 1}
    assert world.events()["declined"] == NUM_SHARED
    assert world.num_reads() == num_reads


def test_a_receiver_that_would_compute_sooner_than_the_source_reads_does_not_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are read first move twice; without that the pull would have been worth it."""
    monkeypatch.setattr(pull_cost, "BYTES_PER_S", 1.0)
    world = Stored(tmp_path)
    cost, num = world.pull_cost, len(SHARED)
    world.token_s = 1.5 * cost.expected_s(num) / num
    assert cost.is_worth(num)
    assert_finished(world, world.ask_q())
    assert world.q.pulls() == {"declined": 1}


def test_what_a_pull_took_is_held_against_what_reading_and_sending_should_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_cost, "BYTES_PER_S", 1.0)
    world = Stored(tmp_path)
    world.token_s = 5.0
    num, right, wrong = len(SHARED), copy(world.pull_cost), copy(world.pull_cost)
    on_pulled(right, 2 * num, 3.0)
    on_pulled(wrong, num, 3.0)
    asked = world.ask_q_of_a_stuck_disk()
    world.go_on(3.0)
    assert_finished(world, asked)
    assert world.q.pulls() == {"landed": 1}
    assert world.pull_cost.expected_s(num) == right.expected_s(num) != wrong.expected_s(num)


def test_nothing_is_read_for_a_node_to_which_host_memory_is_not_sent(tmp_path: Path) -> None:
    """Its lane gives up what comes from there, as `rdma` does."""
    world = Stored(tmp_path)
    world.ask_q()
    world.step_until(lambda: world.p.scheduler.host_pool.num_read == NUM_SHARED, frames=False)
    (token,) = world.p.connector.transfers
    world.network.frames = [one for one in world.network.frames if one.kind == "open"]
    world.p.connector.abort(token)
    world.settle()
    assert world.q.pulls() == {"missed": 1}
    num_reads = world.num_reads()
    other = make_prompt(len(SHARED), 1)
    assert_finished(world, world.ask((*other, 1), max_tokens=3, may_wait=True))
    assert world.q.pulls() == {"missed": 2}
    assert world.num_reads() == num_reads
    world.advance(FIRST_PAUSE_S)
    third = make_prompt(len(SHARED), 2)
    assert_finished(world, world.ask((*third, 1), max_tokens=3, may_wait=True))
    assert world.q.pulls() == {"missed": 2, "landed": 1}


@pytest.mark.parametrize("way", WAYS)
def test_what_half_of_host_memory_does_not_hold_is_read_and_sent_in_parts(
    way: dict[str, Any], tmp_path: Path
) -> None:
    world = Stored(tmp_path, num_host_blocks=7)
    num_reads = world.num_reads()
    assert_finished(world, world.ask_q(**way))
    assert world.q.pulls() == {"landed": 2}
    assert world.num_reads() == num_reads + 2
    assert world.p.sent() == {"pool": 0, "host": 0, "disk": NUM_SHARED}
    assert world.q.num_computed() == 1
    assert world.p.scheduler.host_pool.num_read == 0


def test_the_time_of_a_part_is_told_with_what_was_read_and_sent_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Stored(tmp_path, num_host_blocks=7)
    told: list[int] = []
    on_pulled = world.pull_cost.on_pulled

    def note(num_tokens: int, began_at_s: float, now_s: float, num_at_source: int) -> None:
        told.append(num_tokens)
        on_pulled(num_tokens, began_at_s, now_s, num_at_source)

    monkeypatch.setattr(world.pull_cost, "on_pulled", note)
    assert_finished(world, world.ask_q())
    at_once = 3 * BLOCK_SIZE
    assert told == [2 * at_once, 2 * (len(SHARED) - at_once)], "each is read and sent"


@pytest.mark.parametrize("num_steps", range(1, 12, everyday(3, of=1)))
@pytest.mark.parametrize("is_one_sided", [False, True])
def test_an_abort_at_any_moment_leaves_nothing(
    num_steps: int, is_one_sided: bool, tmp_path: Path
) -> None:
    world = Stored(tmp_path)
    world.have_in_pool(1)
    world.network.is_one_sided = is_one_sided
    world.disk.num_polls = 2
    world.check_abort_after(num_steps)


@pytest.mark.parametrize("num_steps", range(1, 12, everyday(3, of=1)))
def test_a_source_that_dies_at_any_moment_costs_the_pull(num_steps: int, tmp_path: Path) -> None:
    world = Stored(tmp_path)
    world.disk.num_polls = 2
    world.check_death_after(num_steps)


def test_a_receiver_that_dies_leaves_what_is_read_to_others(tmp_path: Path) -> None:
    world = Stored(tmp_path)
    world.have_in_pool(2)
    world.ask_q_of_a_stuck_disk()
    world.kill(world.q, is_noticed=False)
    world.p.connector.on_peer_lost(OTHER)
    world.settle()
    assert not world.p.flow.sends
    assert world.p.scheduler.host_pool.num_read == 0
    world.go_on()
    assert world.in_host() == NUM_SHARED
    assert world.p.sent() == {"pool": 0, "host": 0, "disk": 0}


@pytest.mark.covers("F124", "F126")
def test_random_faults_of_disks_and_deaths_change_no_answer(tmp_path: Path) -> None:
    sent: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for seed in range(everyday(6, of=100)):
        choose = random.Random(seed)
        world = Stored(tmp_path / str(seed), num_host_blocks=choose.choice([7, 8, 9]))
        world.network.is_one_sided = seed % 3 == 0
        world.p.calls.fault = sometimes(choose, choose.choice([0.0, 0.02, 0.3]))
        world.p.calls.flip = lambda choose=choose: choose.random() < 0.02  # type: ignore[misc]
        asked = [world.ask_q(last=20, max_tokens=choose.randint(1, 8), seed=seed)]
        lapsed: list[Asked] = []
        for _ in range(choose.randint(5, 40)):
            happens = choose.random()
            if happens < 0.1:
                world.disk.is_stuck = not world.disk.is_stuck
            elif happens < 0.15:
                family = choose.randrange(6)
                prompt = (*make_prompt(len(SHARED), family), len(asked))
                asked.append(world.ask(prompt, max_tokens=3, may_wait=True))
            elif happens < 0.16 and world.p.me in world.nodes:
                world.kill(world.p, is_noticed=False)
                world.q.connector.on_peer_lost(PREFILL)
            elif happens < 0.18:
                seconds = choose.choice([1.0, 2 * LEASE_S])
                lapsed += [one for one in asked if seconds > LEASE_S and not one.outcomes]
                world.advance(seconds)
            elif world.network.frames and happens < 0.6:
                world.network.deliver(choose.choice(world.network.next_frames()))
            else:
                world.step(frames=False)
        world.disk.is_stuck = False
        world.outlast_faults()
        # The lease of a handoff has ended: a router would send the request again.
        failed = [one for one in lapsed if one.outcomes == ["failed: handoff_failed"]]
        assert_finished(world, *(one for one in asked if one not in failed))
        sent += Counter(world.p.sent())
        outcomes += Counter(world.q.pulls())
    assert sent["disk"] > 0, f"the disk has sent nothing: {sent}"
    assert {"landed", "missed", "failed"} <= set(outcomes), f"an outcome is missing: {outcomes}"
