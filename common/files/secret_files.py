"""Which files may hold a secret, by their owner and their mode.

The files that Kubernetes and Docker mount as secrets belong to another user, and this process reads
them through its group (mode 440) or as anybody (444). The orchestrator decides who else sees them.
So a file of another user may be readable, and a file of this process's own user may not.
"""

from __future__ import annotations

import os
import stat

_GROUP_AND_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_BUT_READING = _GROUP_AND_OTHERS & ~(stat.S_IRGRP | stat.S_IROTH)


def secret_file_problem(path: object, status: os.stat_result, *, user_id: int | None = None) -> str:
    """Return why the file `path` may hold no secret; empty when it may.

    `user_id` is the user who reads it, by default the effective user of this process.
    """
    if stat.S_ISDIR(status.st_mode):
        return f"{path} is a folder: wanted a file"
    mode = stat.S_IMODE(status.st_mode)
    user_id = os.geteuid() if user_id is None else user_id
    if status.st_uid == user_id and mode & _GROUP_AND_OTHERS:
        return (
            f"{path} may be used by others than its owner (mode {mode:03o}): wanted 600, "
            f"`chmod 600 {path}`"
        )
    if mode & _BUT_READING:
        return (
            f"{path} belongs to another user and may be changed by others (mode {mode:03o}): "
            "wanted 440, or 444 as in a mounted secret"
        )
    return ""
