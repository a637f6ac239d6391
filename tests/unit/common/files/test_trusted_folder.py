"""A folder of code is one into which nobody else can put a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.files import trusted_folder
from common.files.trusted_folder import why_untrusted

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cache/numba/0123"
    folder.mkdir(parents=True)
    (folder / "kernel.nbi").touch(0o644)
    return folder


def test_what_this_user_made_is_trusted(folder: Path) -> None:
    assert why_untrusted(folder) == ""
    assert why_untrusted(folder / "to/be/made") == ""


@pytest.mark.parametrize("part", ["0123", "0123/kernel.nbi", "", ".."])
def test_a_folder_below_one_that_everybody_may_write_is_not_trusted(
    folder: Path, part: str
) -> None:
    changed = folder.parent / part
    changed.chmod(0o707)
    assert why_untrusted(folder) == f"everybody may write {changed.resolve()} (mode 707)"


def test_in_a_sticky_folder_only_what_lies_there_counts(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    assert why_untrusted(folder) == ""
    folder.chmod(0o1777)
    assert "everybody may write" in why_untrusted(folder)


@needs_root
@pytest.mark.parametrize("part", ["0123", "0123/kernel.nbi", "", ".."])
def test_what_belongs_to_another_user_is_not(folder: Path, part: str) -> None:
    changed = folder.parent / part
    os.chown(changed, NOBODY, 0)
    why = why_untrusted(folder)
    assert why.startswith(f"{changed.resolve()} belongs to another user (")
    folder.parent.chmod(0o1777)  # the owner of a sticky folder exchanges what is in it
    assert "belongs to another user" in why_untrusted(folder)


@needs_root
@pytest.mark.parametrize(
    ("uid_map", "is_root_unnamed"),
    [
        ("0 0 4294967295", False),  # no namespace of its own: nobody is a user
        ("0 1000 1\n1 100000 65536", False),  # that of a container without root's rights
        ("1000 1000 1", True),
        ("0 1000 1", True),
    ],
)
def test_folders_above_may_be_of_a_root_whom_the_namespace_has_not(
    folder: Path, uid_map: str, is_root_unnamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "uid_map").write_text(f"{uid_map}\n")
    monkeypatch.setattr(trusted_folder, "UID_MAP", folder.parent / "uid_map")
    os.chown(folder.parent, NOBODY, 0)
    assert (why_untrusted(folder) == "") is is_root_unnamed
    folder.parent.chmod(0o757)
    assert "may write" in why_untrusted(folder) or not is_root_unnamed
    folder.parent.chmod(0o755)
    os.chown(folder / "kernel.nbi", NOBODY, 0)
    assert "belongs to another user" in why_untrusted(folder)


@needs_root
def test_a_group_counts_when_it_has_other_members(folder: Path) -> None:
    folder.chmod(0o770)
    assert why_untrusted(folder) == ""  # root's own group
    os.chown(folder, 0, NOBODY)  # nobody's own group
    assert "others of its group may write" in why_untrusted(folder)
    os.chown(folder, 0, 54_321)  # such as Kubernetes gives to a volume
    assert why_untrusted(folder) == ""


def test_above_a_folder_that_was_named_nothing_is_judged(folder: Path) -> None:
    named = folder.parent.parent
    named.chmod(0o777)
    assert why_untrusted(folder, below=named) == ""
    assert "everybody may write" in why_untrusted(folder)
    folder.parent.chmod(0o777)
    assert "everybody may write" in why_untrusted(folder, below=named)


def test_the_target_of_a_link_is_judged(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert why_untrusted(link) == ""
    folder.chmod(0o777)
    assert f"everybody may write {folder}" in why_untrusted(link)


def test_where_a_link_lies_is_judged(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links/0123"
    link.symlink_to(folder)
    (tmp_path / "links").chmod(0o777)
    assert f"everybody may write {tmp_path / 'links'}" in why_untrusted(link)
