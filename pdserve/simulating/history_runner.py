"""A process that runs histories: `python -m pdserve.simulating.history_runner WISHES`.

It reads lines, each with a first seed and a number of histories, and writes a line for each: what
is wrong in these histories, one text for each, empty where nothing is. All are JSON. It ends with
its input, and with its owner; Ctrl-C reaches its owner only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import TextIO

from common.child_process import begin_helper
from simulator.faults.cluster import run_history
from simulator.faults.drawing import Wishes
from simulator.faults.history import History
from simulator.faults.kinds import FaultKind
from simulator.faults.search import quiet, wrong_histories


def wishes_json(wishes: Wishes) -> str:
    """Return wishes as JSON, which `wishes_of` reads."""
    return json.dumps(asdict(wishes), default=lambda kind: kind.value)


def wishes_of(text: str) -> Wishes:
    """Return the wishes of `wishes_json`."""
    found = json.loads(text)
    return Wishes(**{**found, "kinds": tuple(FaultKind(name) for name in found["kinds"])})


def serve(
    requests: Iterable[str], replies: TextIO, wishes: Wishes, run: Callable[[History], str]
) -> None:
    """Run what `requests` ask for, until they end."""
    with quiet():
        for line in requests:
            first, number = json.loads(line)
            found = wrong_histories(range(first, first + number), wishes, run)
            texts = ["" if one is None else one.wrong for one in found]
            print(json.dumps(texts), file=replies, flush=True)


def main() -> None:
    """Serve the standard input and output, on which nothing else is printed."""
    begin_helper()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with suppress(BrokenPipeError):  # its owner died
        serve(sys.stdin, replies, wishes_of(sys.argv[1]), run_history)


if __name__ == "__main__":
    main()
