"""Whether a folder may hold code that this process runs: nobody else can put a file into it.

Compiled kernels are read as pickles and machine code, so who writes them runs code as this user.
Root is trusted, and so is a group that has no other members.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path


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
    return _first_problem(files, may_be_sticky=False) or _first_problem(above, may_be_sticky=True)


def is_trusted(status: os.stat_result) -> bool:
    """Return whether nobody else can have written a file with this status."""
    return not _problem(Path(), status, may_be_sticky=False)


def _first_problem(paths: Iterable[Path], *, may_be_sticky: bool) -> str:
    for path in paths:
        try:
            status = path.lstat()
        except FileNotFoundError:  # one that is to be made, or a file that was just removed
            continue
        if problem := _problem(path, status, may_be_sticky=may_be_sticky):
            return problem
    return ""


def _problem(path: Path, status: os.stat_result, *, may_be_sticky: bool) -> str:
    mode, shown = status.st_mode, f"(mode {stat.S_IMODE(status.st_mode):03o})"
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user ({_user_name(status.st_uid)})"
    if stat.S_ISLNK(mode) or (may_be_sticky and mode & stat.S_ISVTX):
        return ""  # what lies in a sticky folder is exchanged by its owner alone
    if mode & stat.S_IWOTH:
        return f"everybody may write {path} {shown}"
    if mode & stat.S_IWGRP and _has_other_members(status.st_gid):
        return f"others of its group may write {path} {shown}"
    return ""


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
