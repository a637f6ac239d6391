"""Kernels compiled in several processes: `python -m engine.runner.gpu.compiling`, asked by a node.

Triton compiles one kernel at a time in a process, and a decoder has dozens. Each process takes a
share and leaves compiled kernels in Triton's cache, where the node finds them. A kernel that does
not compile is left out: the node gets the error when it loads the kernel.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from common.child_process import module_command, module_environment
from common.control_group import num_cores
from common.files.code_cache import code_cache_folder
from engine.runner.gpu.launcher import KernelSpec

_FEW = 4
"""Most kernels that the node compiles itself, sooner than further processes would start."""
_MOST_PROCESSES = 16
_MOST_WAIT_S = 300.0
"""Seconds after which a process is killed; all kernels take 20 s on 16 cores."""


def use_own_cache() -> Path:
    """Let Triton keep compiled kernels in this project's cache; return the folder.

    It is named after the kernels' sources, and no other user can put code into it.
    """
    if "TRITON_CACHE_DIR" not in os.environ:
        os.environ["TRITON_CACHE_DIR"] = code_cache_folder(Path(__file__).parent / "kernels")
    return Path(os.environ["TRITON_CACHE_DIR"])


def compile_together(specs: Sequence[KernelSpec], capability: int) -> None:
    """Compile kernels for a compute capability, unless that was done before."""
    described = [_described(spec) for spec in specs]
    digest = hashlib.sha256(repr((sorted(map(repr, described)), capability)).encode())
    stamp = use_own_cache() / f"together-{digest.hexdigest()[:32]}"
    if len(specs) <= _FEW or stamp.exists():
        return
    count = min(_MOST_PROCESSES, num_cores(), len(specs))
    command, environment = module_command("engine.runner.gpu.compiling"), module_environment()
    processes = []
    for first in range(count):
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdin=subprocess.PIPE, env=environment
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and the node compiles its share
            process.stdin.write(json.dumps([described[first::count], capability]).encode())
            process.stdin.close()
        processes.append(process)
    codes = [_ended(process) for process in processes]
    if not any(codes):
        stamp.touch()


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process; one that hangs is killed, and the node compiles itself."""
    try:
        return process.wait(_MOST_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _described(spec: KernelSpec) -> dict[str, Any]:
    """Return a configuration as JSON values, with its function by name, for another process."""
    described = {one.name: getattr(spec, one.name) for one in fields(spec)}
    for name in ("types", "constants", "options"):
        described[name] = dict(described[name])
    return described | {"function": [spec.function.__module__, spec.function.__name__]}


def main() -> None:
    """Compile the share that comes on standard input."""
    described, capability = json.load(sys.stdin)
    for of_spec in described:
        module, name = of_spec["function"]
        spec = KernelSpec(**of_spec | {"function": getattr(importlib.import_module(module), name)})
        with contextlib.suppress(Exception):  # the node meets it again, and tells it
            spec.compile(capability)


if __name__ == "__main__":
    main()
