"""Compile the CPU kernels into the cache before tests run: no test's time limit includes it.

Two processes divide them: layers and products of float32 rows take about as long as draws and
products of int8 rows. Those of every format are compiled, so that no two processes of a run of
tests compile the same one.

Even where all of them are in the cache, loading each once takes 9 s of a processor. So a stamp
beside them says that it was done: it is missing where the sources, numba, the processor or numba's
variables have changed, and where the cache was removed.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

from common.files.code_cache import code_cache_folder
from common.request import GREEDY_BELOW

# Kernels of draws and of copies are compiled by their import, so modules are imported late. numba
# is too: importing it takes longer than reading the stamp.

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("common", "engine", "kv_transfer", "pdserve/checkpoints", "tests/support")
"""The folders of what is compiled, and of what says for which types it is."""
PACKAGES = ("numba", "llvmlite", "numpy")


def compile_layers() -> None:
    """Compile both kinds of layers, and what multiplies float32 rows with every format."""
    from engine.runner.cpu import common_kernels
    from engine.runner.kernels.products.activations import clamped_swish_kernel, gelu_kernel
    from engine.runner.kernels.products.group_layout import CODES
    from engine.runner.kernels.products.group_product import few_rows_kernel, widening_kernel
    from engine.runner.kernels.products.panel_product import float_kernel

    common_kernels.compile_layers()
    common_kernels.compile_attention()
    common_kernels.compile_expert_layers()
    gelu_kernel()
    clamped_swish_kernel(1.702, 7.0)
    float_kernel()
    for code in CODES.values():
        few_rows_kernel(code)
        widening_kernel(code)


def compile_draws_and_bytes() -> None:
    """Compile draws, copies of KV, and what multiplies int8 rows with every format."""
    from engine.runner.cpu import common_kernels
    from engine.runner.kernels.products.byte_product import byte_kernel
    from engine.runner.kernels.products.group_layout import CODES
    from tests.support.models.byte_kernels import FASTEST, FEW

    common_kernels.compile_draws()
    import kv_transfer.lanes.fused_copy
    import kv_transfer.zmq.parts  # noqa: F401

    for name, is_fine, instruction in (*FASTEST, *FEW):
        byte_kernel(CODES[name], instruction, is_fine=is_fine)


def load_demo_model() -> None:
    """Load the demo model, with its drafting layer, and execute steps of every kind."""
    from pdserve.checkpoints.demo_model import demo_model_folder
    from tests.support.models.pressure import load_runner

    for activations in ("int8", "float32"):
        runner = load_runner(demo_model_folder(False), 2, activation_dtype=activations)
        runner.warm_up()


def compile_all() -> None:
    """Compile everything, and leave nothing to the first steps of the demo model."""
    beside = multiprocessing.get_context("spawn").Process(target=compile_draws_and_bytes)
    beside.start()
    compile_layers()
    beside.join()
    if beside.exitcode:
        raise SystemExit(f"compiling kernels of draws and bytes ended with {beside.exitcode}")
    load_demo_model()


def facts() -> Iterator[str]:
    """Yield what compiled code depends on beside its sources."""
    yield sys.version
    yield from map(version, PACKAGES)
    yield get_host_cpu_name()
    yield get_host_cpu_features().flatten()
    yield from (f"{name}={os.environ[name]}" for name in sorted(os.environ) if "NUMBA_" in name)


def stamp(root: Path = ROOT) -> Path:
    """Return the path of the file that says that all is compiled: it lies beside the kernels."""
    digest = hashlib.sha256(repr(list(facts())).encode())
    for path in sorted(path for folder in SOURCES for path in (root / folder).rglob("*.py")):
        contents = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(contents)} ".encode() + contents)
    folder = code_cache_folder(root / "engine/runner/kernels", GREEDY_BELOW)
    return Path(folder) / f"{digest.hexdigest()[:16]}.tests"


def main() -> None:
    done = stamp()
    if done.exists():
        return
    compile_all()
    with suppress(OSError):  # then the next run looks again
        done.touch()


if __name__ == "__main__":
    main()
