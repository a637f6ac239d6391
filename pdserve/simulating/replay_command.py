"""`pdserve simulate --replay` with a recording: are the decisions made again the recorded ones?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from common.version import VERSION
from simulator.replays.replay import Replayed, replay_recording

_MOST_SHOWN = 2000


def run_replay(path: Path, out: TextIO, *, is_json: bool) -> bool:
    """Replay a recording and tell what came of it; return whether no decision differs.

    Raises `ConfigError` for a file that is no recording, or not a whole one.
    """
    replayed = replay_recording(path)
    if is_json:
        print(json.dumps(asdict(replayed)), file=out)
    else:
        for line in _lines_of(replayed, path):
            print(line, file=out)
    return replayed.difference is None


def _lines_of(replayed: Replayed, path: Path) -> list[str]:
    who = replayed.node_id
    lines = []
    if replayed.version != VERSION:
        lines.append(f"recorded by version {replayed.version}, replayed by version {VERSION}")
    found, num = replayed.difference, replayed.num_decisions
    if found is None:
        return [*lines, f"{who}: {num} {replayed.what}, and all are the same"]
    return [
        *lines,
        f"{who}: {num} {replayed.what} until a decision differs",
        f"  at {found.at_s:.4f} s, line {found.line} of {path}: {found.what}",
        f"  recorded: {found.recorded[:_MOST_SHOWN]}",
        f"  replayed: {found.replayed[:_MOST_SHOWN]}",
    ]
