"""Nodes whose pools and host memory are too small for the prompts that come back: a disk has them.

The disk is real files under calls that fail. Whatever it does costs hits and nothing else.
"""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import pytest

from engine.core.statistics import DiskEvent
from node.flow.disk.prefix_disk import LOOK_S
from node.flow.pause import FIRST_PAUSE_S
from tests.simulation.scripted_node import BLOCK_SIZE, Node, NodeSize
from tests.simulation.world import World, assert_finished
from tests.support.disk.faulty_files import READING, WRITING, sometimes
from tests.support.engine.build import make_prompt
from tests.support.examples import everyday

NUM_FAMILIES = 6


def on_disk(path: Path, num_blocks: int = 9, num_host_blocks: int = 8, **given: object) -> NodeSize:
    """A node whose host memory has room for two of the prefixes below."""
    return NodeSize(
        num_blocks=num_blocks,
        max_model_len=28,
        num_host_blocks=num_host_blocks,
        keeps_prefixes=True,
        disk_path=path / "prefixes",
        **given,  # type: ignore[arg-type]
    )


def mixed(path: Path, **given: int) -> World:
    return World(threshold=None, decode=on_disk(path, **given))


def ask(world: World, family: int, last: int, **given: object) -> None:
    """Answer a prompt of one beginning, four blocks long, and a token of its own."""
    prompt = (*make_prompt(16, family), last)
    given = {"max_tokens": 3, "ignore_eos": True, "may_wait": True, **given}
    assert_finished(world, world.ask(prompt, **given))


def fill(world: World) -> None:
    """Use each beginning twice, in turn, so that all but the last are evicted to disk."""
    for family in range(NUM_FAMILIES):
        for last in (1, 2):
            ask(world, family, last)


def found(node: Node) -> dict[str, int]:
    return node.scheduler.statistics().counters.prefix_blocks_found


def events(node: Node) -> dict[str, int]:
    return node.scheduler.statistics().counters.disk


def files(path: Path) -> list[Path]:
    return sorted((path / "prefixes").glob("node-*/*/*"))


@pytest.mark.parametrize("threshold", [0, None], ids=["handoff", "mixed"])
@pytest.mark.parametrize("num_polls", [0, 3])
def test_every_prompt_that_comes_back_finds_its_prefix(
    threshold: int | None, num_polls: int, tmp_path: Path
) -> None:
    world = World(threshold=threshold, prefill=on_disk(tmp_path), decode=on_disk(tmp_path))
    node = world.d if threshold is None else world.p
    for one in world.nodes.values():
        assert one.disk is not None
        one.disk.num_polls = one.runner.num_copy_polls = num_polls
    fill(world)
    for last in (3, 4, 5):
        for family in range(NUM_FAMILIES):
            ask(world, family, last)
    assert found(node)["disk"] >= 2 * 3 * BLOCK_SIZE
    assert events(node)[DiskEvent.WRITTEN.value] <= 4 * NUM_FAMILIES, "written more than once"
    assert events(node)[DiskEvent.LATE.value] == 0
    if threshold == 0:
        assert events(world.d)[DiskEvent.READ.value] == 0, "a reservation waited for a disk"
    assert sum(found(node).values()) >= 3 * NUM_FAMILIES * 4


@pytest.mark.covers("F131")
def test_a_node_that_restarts_finds_what_it_had(tmp_path: Path) -> None:
    before = mixed(tmp_path)
    fill(before)
    before.d.disk.folder.close()  # type: ignore[union-attr]
    after = mixed(tmp_path)
    after.settle()
    size = after.d.scheduler.statistics().disk
    assert size == before.d.scheduler.statistics().disk
    assert size.num_blocks == len(files(tmp_path)) >= 8
    ask(after, 0, 3)
    assert found(after.d) == {"pool": 0, "host": 0, "disk": 4}
    assert [path.parent.parent.name for path in files(tmp_path)] == ["node-0"] * size.num_blocks


def test_another_node_of_the_host_reads_them_and_removes_none(tmp_path: Path) -> None:
    first, second = mixed(tmp_path), mixed(tmp_path, num_disk_blocks=2)
    second.settle()
    fill(first)
    ask(second, 0, 3)
    assert found(second.d)["disk"] == 0, "not seen yet"
    second.advance(LOOK_S)
    second.settle()
    kept = files(tmp_path)
    ask(second, 1, 3)
    assert found(second.d)["disk"] == 4
    assert set(kept) <= set(files(tmp_path))


@pytest.mark.covers("F127")
@pytest.mark.parametrize("num_disk_blocks", [0, 1, 3, 6])
def test_the_bound_holds_and_what_was_used_longest_ago_goes_first(
    num_disk_blocks: int, tmp_path: Path
) -> None:
    world = mixed(tmp_path, num_disk_blocks=num_disk_blocks)
    for last in range(1, 6):
        for family in range(NUM_FAMILIES):
            for again in (0, 1):
                ask(world, family, 2 * last + again)
                assert len(files(tmp_path)) <= num_disk_blocks
    size = world.d.scheduler.statistics().disk
    assert size.num_blocks == len(files(tmp_path)) == num_disk_blocks
    assert (events(world.d)["removed"] > 0) == (num_disk_blocks > 0)


@pytest.mark.parametrize("advanced_s", [0.0, LOOK_S], ids=["write", "look"])
def test_the_bound_holds_where_the_folder_vanished_and_another_node_took_its_place(
    advanced_s: float, tmp_path: Path
) -> None:
    first = mixed(tmp_path, num_disk_blocks=12)
    fill(first)
    assert len(files(tmp_path)) == 12
    shutil.rmtree(tmp_path / "prefixes")
    second = mixed(tmp_path, num_disk_blocks=12)
    second.settle()
    fill(second)
    assert len(files(tmp_path)) == 12
    first.advance(advanced_s)
    first.settle()
    fill(first)
    assert {path.parent.parent.name for path in files(tmp_path)} == {"node-0"}
    if advanced_s:
        assert first.d.scheduler.statistics().disk.num_blocks == 0
    first.advance(2 * FIRST_PAUSE_S)
    for world in (first, second):
        world.settle()
        fill(world)
        fill(world)
    for number, world in ((1, first), (0, second)):
        own = [path for path in files(tmp_path) if path.parent.parent.name == f"node-{number}"]
        assert world.d.scheduler.statistics().disk.num_blocks == len(own) == 12


def test_tenants_with_equal_prompts_do_not_share_files(tmp_path: Path) -> None:
    world = mixed(tmp_path)
    for salt in ("a", "b"):
        for family in range(NUM_FAMILIES):
            for last in (1, 2):
                ask(world, family, last, cache_salt=salt)
    before = found(world.d)["disk"]
    for last in (3, 4):
        ask(world, 0, last, cache_salt="c")
    assert found(world.d)["disk"] == before
    ask(world, 0, 5, cache_salt="a")
    assert found(world.d)["disk"] == before + 4


def test_a_prompt_waits_for_a_hung_disk_no_longer_than_computing_takes(tmp_path: Path) -> None:
    world = mixed(tmp_path, num_host_blocks=12)
    fill(world)
    node = world.d
    assert node.disk is not None
    node.disk.is_stuck = True
    asked = world.ask((*make_prompt(16, 0), 9), max_tokens=3, ignore_eos=True, may_wait=True)
    world.settle()
    assert not asked.is_done
    assert len(node.scheduler.waiting) == 0
    world.advance(16 * world.token_s)
    world.settle()
    assert asked.outcomes == ["finished"]
    assert events(node)["late"] == 4
    # Nobody else waits for it, also when the pause is over, as long as that read hangs.
    for family, advanced_s in ((1, 0.0), (2, 10 * FIRST_PAUSE_S)):
        world.advance(advanced_s)
        asked = world.ask(
            (*make_prompt(16, family), 10), max_tokens=3, ignore_eos=True, may_wait=True
        )
        world.settle()
        assert asked.outcomes == ["finished"]
    node.disk.is_stuck = False
    world.settle()
    world.check_closed()
    world.advance(10 * FIRST_PAUSE_S)
    world.settle()
    before = found(node)["disk"]
    ask(world, 3, 12)
    ask(world, 2, 12)
    assert found(node)["disk"] > before


def test_those_that_wait_for_a_disk_fill_the_queue(tmp_path: Path) -> None:
    world = mixed(tmp_path, max_queued=2)
    fill(world)
    assert world.d.disk is not None
    world.d.disk.is_stuck = True
    asked = []
    for last in (9, 10, 11):
        prompt = (*make_prompt(16, 0), last)
        asked.append(world.ask(prompt, max_tokens=3, ignore_eos=True, may_wait=True))
        world.settle()
    assert world.d.flow.snapshot().load.num_waiting == 2
    assert asked[2].error is not None
    assert asked[2].error.code == "overloaded"
    world.d.disk.is_stuck = False
    world.settle()
    world.check_closed()
    assert [one.outcomes for one in asked[:2]] == [["finished"], ["finished"]]
    assert len(world.d.disk.done[-1].hashes) == 4, "one read for both"  # type: ignore[union-attr]


def test_an_attempt_that_is_aborted_while_it_waits_for_a_read(tmp_path: Path) -> None:
    world = mixed(tmp_path)
    fill(world)
    assert world.d.disk is not None
    world.d.disk.is_stuck = True
    asked = world.ask((*make_prompt(16, 0), 9), max_tokens=3, ignore_eos=True, may_wait=True)
    world.settle()
    world.router.abort(asked)
    world.settle()
    assert not len(world.d.flow.attempts)
    world.d.disk.is_stuck = False
    world.settle()
    world.check_closed()
    assert events(world.d)["read"] == 4
    ask(world, 0, 10)
    assert found(world.d)["host"] == 4, "what was read for it is there for others"


def test_where_computing_is_quicker_nothing_is_read(tmp_path: Path) -> None:
    world = mixed(tmp_path)
    fill(world)
    world.token_s = 1e-6
    ask(world, 0, 9)
    assert found(world.d)["disk"] == 0
    assert events(world.d)["declined"] == 4


ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT)


@pytest.mark.covers("F127")
@pytest.mark.parametrize("number", ERRORS[: everyday(1, of=4)])
@pytest.mark.parametrize("name", WRITING)
def test_a_disk_that_cannot_be_written_is_left_alone_for_a_while(
    name: str, number: int, tmp_path: Path
) -> None:
    world = mixed(tmp_path)
    world.settle()
    node = world.d
    node.calls.fault = lambda called: number if called == name else None
    if name in ("make_folder", "lock"):
        shutil.rmtree(tmp_path / "prefixes")
    fill(world)
    assert events(node)["write_failed"] <= 1 + (name == "remove")
    num_calls = node.calls.num_calls
    fill(world)
    if events(node)["write_failed"]:
        assert node.calls.num_calls == num_calls, "tried again at once"
    node.calls.fault = lambda called: None
    world.advance(2 * FIRST_PAUSE_S)
    world.settle()
    fill(world)
    assert node.scheduler.statistics().disk.num_blocks == len(files(tmp_path)) > 0
    assert not [path for path in files(tmp_path) if path.suffix != ".kv"]


def test_a_disk_that_stays_broken_is_tried_less_and_less_often(tmp_path: Path) -> None:
    world = mixed(tmp_path)
    world.d.calls.fault = lambda called: errno.EROFS if called == "lock" else None
    world.settle()
    failed = []
    for _ in range(8):
        failed.append(events(world.d)["write_failed"])
        world.advance(FIRST_PAUSE_S + 1)
        world.settle()
    assert failed == [1, 2, 2, 3, 3, 3, 3, 4]


@pytest.mark.covers("F126")
@pytest.mark.parametrize("name", READING)
def test_a_disk_that_cannot_be_read_costs_hits(name: str, tmp_path: Path) -> None:
    world = mixed(tmp_path)
    fill(world)
    node = world.d
    node.calls.fault = lambda called: errno.EIO if called == name else None
    ask(world, 0, 9)
    if name in ("open_old", "is_own", "read", "close"):
        assert found(node)["disk"] == 0
        assert events(node)["read_failed"] == 1
        num_calls = node.calls.num_calls
        ask(world, 1, 9)
        assert node.calls.num_calls == num_calls, "tried again at once"
        assert events(node)["declined"] == 4
    else:
        assert found(node)["disk"] == 4
    node.calls.fault = lambda called: None
    world.advance(2 * FIRST_PAUSE_S)
    world.settle()
    before = found(node)["disk"]
    ask(world, 2, 10)
    assert found(node)["disk"] == before + 4


@pytest.mark.covers("F124")
@pytest.mark.parametrize("how", ["bit", "cut", "longer", "other", "empty", "gone"])
def test_a_file_that_is_not_what_was_written_is_never_used(how: str, tmp_path: Path) -> None:
    world = mixed(tmp_path)
    fill(world)
    kept = files(tmp_path)
    contents = {path: path.read_bytes() for path in kept}
    for n, (path, content) in enumerate(contents.items()):
        changed = {
            "bit": bytes([*content[:-9], content[-9] ^ 1, *content[-8:]]),
            "cut": content[: len(content) // 2],
            "longer": content + b"x",
            "other": contents[kept[n - 1]],
            "empty": b"",
        }
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(changed[how])
    for family in range(NUM_FAMILIES):
        ask(world, family, 8)
    assert found(world.d)["disk"] == 0
    assert events(world.d)["vanished" if how == "gone" else "corrupt"] > 0


@pytest.mark.parametrize("seed", range(everyday(4, of=24)))
def test_random_faults_change_no_answer_and_unbalance_no_book(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    kinds = {
        "num_host_blocks": choose.choice([2, 6, 24]),
        "num_disk_blocks": choose.choice([3, 99]),
    }
    world = World(
        threshold=choose.choice([None, 0, 6]),
        prefill=on_disk(tmp_path, choose.randint(8, 10), **kinds),
        decode=on_disk(tmp_path, choose.randint(8, 12), **kinds),
        is_async=bool(seed % 2),
        goes_on=("", "early", "late")[seed // 2 % 3] if seed % 2 else "",
    )
    nodes = list(world.nodes.values())
    for node in nodes:
        share = choose.choice([0.0, 0.02, 0.3])
        numbers = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE)
        node.calls.fault = sometimes(choose, share, numbers)
        node.calls.flip = lambda: choose.random() < 0.02
        node.calls.is_short = choose.random() < 0.5
    for number in range(30):
        prompt = (*make_prompt(choose.choice([8, 12, 16]), choose.randrange(NUM_FAMILIES)), number)
        asked = world.ask(
            prompt, max_tokens=choose.randint(1, 8), ignore_eos=True, may_wait=True, seed=number
        )
        for _ in range(choose.randint(0, 12)):
            world.step()
        node = choose.choice(nodes)
        assert node.disk is not None
        node.disk.num_polls = choose.choice([0, 1, 4])
        node.disk.is_stuck = choose.random() < 0.1
        node.runner.num_copy_polls = choose.choice([0, 1, 4])
        node.runner.fail_next_copy = choose.random() < 0.1
        node.runner.fail_next_step = choose.random() < 0.05
        if choose.random() < 0.1:
            world.advance(choose.choice([1.0, 40.0]))
        if choose.random() < 0.1:
            for path in choose.sample(files(tmp_path), len(files(tmp_path)) // 2):
                path.unlink()
        if choose.random() < 0.03:
            shutil.rmtree(tmp_path / "prefixes", ignore_errors=True)
        if choose.random() < 0.1:
            world.router.abort(asked)
    for node in nodes:
        assert node.disk is not None
        node.disk.is_stuck = node.runner.fail_next_copy = node.runner.fail_next_step = False
    world.settle()
    world.check_closed()
