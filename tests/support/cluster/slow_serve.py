"""Becomes `pdserve serve …`, whose steps take a while each as long as a file exists: FILE ….

A test that does something to requests that run must not have to be faster than they are. Three more
files disturb one node: with `FILE.held.NODE` a step holds the interpreter lock for `HELD_S`, once,
as long as there is `FILE.hung.NODE` a step does not end, and with `FILE.failed.NODE` the node's GPU
fails beside a step.
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

    held, hung, failed = (Path(f"{file}.{what}.{node_id}") for what in ("held", "hung", "failed"))
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
            if failed.exists():
                failed.unlink()
                break_gpu()
        return has_ended

    StepLoop._end_step = end_slowly  # type: ignore[method-assign]


def break_gpu() -> None:
    """Launch a kernel that reads where nothing is: all that this process has on the GPU is lost."""
    from engine.runner.gpu.card import open_card
    from engine.runner.gpu.kernels.gathering import gather_rows
    from engine.runner.gpu.launcher import KernelSpec

    card = open_card()
    types = {"source": "*bf16", "rows": "*i32", "out": "*bf16"}
    constants = {"N": 16, "COLUMNS": 16, "IS_PROGRAMMATIC": False}
    card.kernel(KernelSpec(gather_rows, types, constants)).bind((1,), 16, 16, 16)(card.stream)


if __name__ == "__main__":
    # Its own folder must not be searched for modules.
    sys.path.pop(0)
    from pdserve.cli import main

    slow_down(Path(sys.argv[1]), sys.argv[sys.argv.index("--node-id") + 1])
    sys.exit(main(["serve", *sys.argv[2:]]))
