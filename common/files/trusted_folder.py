"""Whether a folder may hold code that this process runs: nobody else can put a file into it.

Compiled kernels are read as pickles and machine code, so who writes them runs code as this user.
Root is trusted, and so is a group that has no other members. A user namespace that has not root,
such as that of Apptainer, Flatpak or bubblewrap, shows root's folders as those of nobody.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path

UID_MAP = Path("/proc/self/uid_map")
"""The users that this process's user namespace has."""
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")


def why_untrusted(folder: Path, *, below: Path | None = None, has_contents: bool = True) -> str:
    """Return who else can change what is in `folder`; empty when nobody can.

    Judges the folder, with `has_contents` all that it holds, and the folders above it that exist,
    down from but without `below`, which was named by somebody who knows who writes there. Raises
    `OSError`.
    """
    target = folder.resolve()
    files = [target, *(target.rglob("*") if has_contents else ())] if target.is_dir() else []
    above = [
        one
        for path, top in ((target, below and below.resolve()), (folder, below))
        for one in path.absolute().parents
        if top is None or top.absolute() in one.parents
    ]
    return _first_problem(files, is_above=False) or _first_problem(above, is_above=True)


def is_trusted(status: os.stat_result) -> bool:
    """Return whether nobody else can have written a file with this status."""
    return not _problem(Path(), status, is_above=False)


def _first_problem(paths: Iterable[Path], *, is_above: bool) -> str:
    for path in paths:
        try:
            status = path.lstat()
        except FileNotFoundError:  # one that is to be made, or a file that was just removed
            continue
        if problem := _problem(path, status, is_above=is_above):
            return problem
    return ""


def _problem(path: Path, status: os.stat_result, *, is_above: bool) -> str:
    mode, shown = status.st_mode, f"(mode {stat.S_IMODE(status.st_mode):03o})"
    is_ours = status.st_uid in (0, os.geteuid())
    if not is_ours and not (is_above and _is_unnamed(status.st_uid)):
        return f"{path} belongs to another user ({_user_name(status.st_uid)})"
    if stat.S_ISLNK(mode) or (is_above and mode & stat.S_ISVTX):
        return ""  # what lies in a sticky folder is exchanged by its owner alone
    if mode & stat.S_IWOTH:
        return f"everybody may write {path} {shown}"
    if mode & stat.S_IWGRP and _has_other_members(status.st_gid):
        return f"others of its group may write {path} {shown}"
    return ""


def _is_unnamed(user_id: int) -> bool:
    """Return whether this id stands for all users, root too, that this user namespace has not."""
    try:
        if user_id != int(_OVERFLOW_UID.read_text()):
            return False
        ranges = [line.split() for line in UID_MAP.read_text().splitlines()]
    except (OSError, ValueError):  # no Linux
        return False
    return not any(int(first) <= user_id < int(first) + int(size) for first, _, size in ranges)


def _has_other_members(group_id: int) -> bool:
    members = {user.pw_uid for user in pwd.getpwall() if user.pw_gid == group_id}
    try:
        names = grp.getgrgid(group_id).gr_mem
    except KeyError:
        names = []
    known = {user.pw_name: user.pw_uid for user in pwd.getpwall()} if names else {}
    members |= {known.get(name, -1) for name in names}
    return bool(members - {0, os.geteuid()})


def _user_name(user_id: int) -> str:
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)
