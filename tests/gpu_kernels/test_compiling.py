"""Kernels that several processes compile are found in the cache by this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# In processes of their own: the interpreter of the other tests replaces what is compiled here.
COMPILE = """
import sys
from engine.runner.gpu import compiling
from engine.runner.gpu.kernels.gathering import gather_rows
from engine.runner.gpu.launcher import KernelSpec

types = {"source": "*bf16", "rows": "*i32", "out": "*bf16"}
specs = [
    KernelSpec(gather_rows, types, {"N": size, "COLUMNS": 64, "IS_PROGRAMMATIC": False}, 1, 1)
    for size in (16, 24, 32, 40, 48)
]
before = compiling.use_own_cache()
compiling.compile_together(specs, 90)
print(before, len(list(before.glob("*/gather_rows.cubin"))), len(list(before.glob("together-*"))))
"""


def compiled(cache: Path) -> list[str]:
    environ = {name: value for name, value in os.environ.items() if name[:6] != "TRITON"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, check=True,
        env=environ | {"PDSERVE_CACHE": str(cache)},
    )  # fmt: skip
    return done.stdout.split()


def test_all_are_compiled_once_and_kept_in_this_projects_cache(tmp_path: Path) -> None:
    folder, *counts = compiled(tmp_path)
    assert Path(folder).is_relative_to(tmp_path)
    assert counts == ["5", "1"]
    assert compiled(tmp_path) == [folder, "5", "1"]
