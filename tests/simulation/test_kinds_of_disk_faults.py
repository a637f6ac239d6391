"""Each kind of fault of a disk, under a node that serves: it costs hits and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from node.flow.disk.prefix_disk import LOOK_S
from node.flow.pause import LONGEST_PAUSE_S
from tests.simulation.scripted_node import Node, NodeSize
from tests.simulation.world import World, right_answer
from tests.support.disk.faulty_files import WRITING
from tests.support.engine.build import make_prompt

NUM_FAMILIES = 6
YEAR_NS = 365 * 24 * 3600 * 10**9


def new_world(path: Path) -> World:
    """One node whose pool and host memory have room for two prefixes each."""
    size = NodeSize(
        num_blocks=9, max_model_len=28, num_host_blocks=8, keeps_prefixes=True,
        disk_path=path / "prefixes",
    )  # fmt: skip
    return World(threshold=None, decode=size)


def ask_all(world: World, last: int) -> None:
    """Answer a prompt of each beginning, rightly."""
    for family in range(NUM_FAMILIES):
        prompt = (*make_prompt(16, family), last)
        asked = world.ask(prompt, max_tokens=3, ignore_eos=True, may_wait=True)
        world.settle()
        if not asked.is_done:  # a disk is waited for, for as long as computing takes
            world.advance(16 * world.token_s)
            world.settle()
        assert asked.outcomes == ["finished"]
        assert asked.answer() == right_answer(asked.request)


def files(path: Path) -> list[Path]:
    found = (path / "prefixes").glob("node-*/*/*.kv")
    return sorted(one for one in found if not one.parents[1].is_symlink())


def from_disk(node: Node) -> int:
    return node.scheduler.statistics().counters.prefix_blocks_found["disk"]


Break = Callable[[Path, Node], None]


def fails(number: int, *names: str) -> Break:
    def begin(path: Path, node: Node) -> None:
        node.calls.fault = lambda called: number if called in names else None

    return begin


def full_in_mid_write(path: Path, node: Node) -> None:
    """The header of each file fits, and nothing behind it."""
    is_behind: Iterator[bool] = iter(())

    def fault(called: str) -> int | None:
        nonlocal is_behind
        if called == "open_new":
            is_behind = iter((False, True))
        return errno.ENOSPC if called == "write" and next(is_behind, True) else None

    node.calls.fault = fault


def slow(path: Path, node: Node) -> None:
    assert node.disk is not None
    node.disk.num_polls = 12


def hung(path: Path, node: Node) -> None:
    assert node.disk is not None
    node.disk.is_stuck = True


def corrupted(path: Path, node: Node) -> None:
    for one in files(path):
        content = bytearray(one.read_bytes())
        content[-1] ^= 1
        one.write_bytes(content)


def truncated(path: Path, node: Node) -> None:
    for one in files(path):
        os.truncate(one, one.stat().st_size // 2)


def of_others(path: Path, node: Node) -> None:
    """Who may write a file may have written it."""
    for one in files(path):
        one.chmod(0o622)


def for_all_users(path: Path, node: Node) -> None:
    (path / "prefixes").chmod(0o777)


def vanished(path: Path, node: Node) -> None:
    shutil.rmtree(path / "prefixes")


def files_vanished(path: Path, node: Node) -> None:
    for one in files(path):
        one.unlink()


def file_for_folder(path: Path, node: Node) -> None:
    vanished(path, node)
    (path / "prefixes").write_text("a file")


def link_for_folder(path: Path, node: Node) -> None:
    (path / "prefixes" / "node-0").rename(path / "away")
    (path / "prefixes" / "node-0").symlink_to(path / "away")


def links_for_files(path: Path, node: Node) -> None:
    (path / "away").mkdir()
    for one in files(path):
        one.rename(path / "away" / one.name)
        one.symlink_to(path / "away" / one.name)


def folders_for_files(path: Path, node: Node) -> None:
    for one in files(path):
        one.unlink()
        one.mkdir()


def clock_back(path: Path, node: Node) -> None:
    """Files, and the lock, are a year newer than now."""
    for one in (*files(path), *(path / "prefixes").glob("node-*/.lock")):
        newer = one.stat().st_mtime_ns + YEAR_NS
        os.utime(one, ns=(newer, newer))


def clock_ahead(path: Path, node: Node) -> None:
    node.calls.ahead_ns = YEAR_NS


KINDS: dict[str, Break] = {
    "full": fails(errno.ENOSPC, "open_new", "write"),
    "full in mid-write": full_in_mid_write,
    "over quota": fails(errno.EDQUOT, "write", "sync"),
    "read-only": fails(errno.EROFS, *WRITING),
    "unreadable": fails(errno.EIO, "read"),
    "gone bad": fails(errno.EIO, *WRITING, "open_old", "is_own", "read", "files", "folders"),
    "no descriptors": fails(errno.EMFILE, "lock", "open_new", "open_old", "files", "folders"),
    "stale": fails(errno.ESTALE, "open_old", "read", "rename", "names", "is_folder", "is_at"),
    "slow": slow,
    "hung": hung,
    "corrupted": corrupted,
    "truncated": truncated,
    "of others": of_others,
    "for all users": for_all_users,
    "vanished": vanished,
    "files vanished": files_vanished,
    "file for folder": file_for_folder,
    "link for folder": link_for_folder,
    "links for files": links_for_files,
    "folders for files": folders_for_files,
    "clock back": clock_back,
    "clock ahead": clock_ahead,
}
COST_NOTHING = {"full", "full in mid-write", "over quota", "clock back", "clock ahead"}
"""What is there can be read."""
DESTROY = {"corrupted", "truncated", "of others", "links for files"}
"""All files are wrong: a disk that is so is left alone for longer and longer."""


def mend(path: Path, node: Node, kind: str) -> None:
    """End the fault, as somebody would who looks after the disk."""
    assert node.disk is not None
    node.calls.fault = lambda called: None
    node.calls.ahead_ns = 0
    node.disk.num_polls, node.disk.is_stuck = 0, False
    top = path / "prefixes"
    if top.is_file():
        top.unlink()
    elif top.is_dir():
        top.chmod(0o700)
    for one in files(path):
        if one.is_dir():
            one.rmdir()
    if kind in DESTROY:
        shutil.rmtree(top)


@pytest.mark.covers("F126", "F127")
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_the_disk_costs_hits_and_nothing_else(kind: str, tmp_path: Path) -> None:
    world = new_world(tmp_path)
    node = world.d
    for last in (1, 2, 3):
        ask_all(world, last)
    before = from_disk(node)
    assert before > 0
    KINDS[kind](tmp_path, node)
    for last in (4, 5):
        ask_all(world, last)
        world.advance(LOOK_S + 1)
        world.settle()
    assert (from_disk(node) > before) or kind not in COST_NOTHING
    mend(tmp_path, node, kind)
    for _ in range(4):
        world.advance(LONGEST_PAUSE_S)
        world.settle()
    for last in (6, 7, 8):
        ask_all(world, last)
    before = from_disk(node)
    ask_all(world, 9)
    assert from_disk(node) > before, "it is not used again"
    world.check_closed()
    named = node.scheduler.statistics().disk.num_blocks
    assert named == len(files(tmp_path)), "no index names a file that is left"
    assert not list((tmp_path / "prefixes").glob("node-*/*/*.new"))


@pytest.mark.parametrize("kind", ["unreadable", "corrupted"])
def test_a_disk_that_was_wrong_for_long_is_read_again_within_two_minutes(
    kind: str, tmp_path: Path
) -> None:
    world = new_world(tmp_path)
    for last in range(3):
        ask_all(world, last)
    assert from_disk(world.d) > 0
    for last in range(3, 11):
        KINDS[kind](tmp_path, world.d)
        world.advance(LONGEST_PAUSE_S)
        ask_all(world, last)
    mend(tmp_path, world.d, kind)
    for _ in range(4):
        world.advance(30)
        world.settle()
    for last in (15, 16, 17):
        ask_all(world, last)
    before = from_disk(world.d)
    ask_all(world, 18)
    assert from_disk(world.d) > before
    world.check_closed()
