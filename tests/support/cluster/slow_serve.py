"""Becomes `pdserve serve …`, whose steps take a while each as long as a file exists: FILE ….

A test that does something to requests that run must not have to be faster than they are. Two more
files disturb one node: with `FILE.held.NODE` a step holds the interpreter lock for `HELD_S`, once,
and as long as there is `FILE.hung.NODE` a step does not end.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

STEP_S = 0.05
HELD_S = 2


def slow_down(file: Path, node_id: str) -> None:
    """Every step of this process, while there is such a file."""
    from engine.step_loop import StepLoop

    held, hung = Path(f"{file}.held.{node_id}"), Path(f"{file}.hung.{node_id}")
    end_step = StepLoop._end_step

    def end_slowly(self: StepLoop[Any, Any]) -> bool:
        has_ended = end_step(self)
        if has_ended and file.exists():
            time.sleep(STEP_S)
            if held.exists():
                held.unlink()
                ctypes.PyDLL(None).sleep(HELD_S)
            while hung.exists():
                time.sleep(STEP_S)
        return has_ended

    StepLoop._end_step = end_slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    # Its own folder must not be searched for modules.
    sys.path.pop(0)
    from pdserve.cli import main

    slow_down(Path(sys.argv[1]), sys.argv[sys.argv.index("--node-id") + 1])
    sys.exit(main(["serve", *sys.argv[2:]]))
