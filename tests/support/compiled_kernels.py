"""Compile the CPU kernels into the cache before tests run: no test's time limit includes it.

Two processes divide them: layers and products of float32 rows take about as long as draws and
products of int8 rows. Those of every format are compiled, so that no two processes of a run of
tests compile the same one.
"""

from __future__ import annotations

import multiprocessing

from engine.runner.kernels.products.group_layout import CODES
from tests.support.models.byte_kernels import FASTEST, FEW

# Kernels of draws and of copies are compiled by their import, so modules are imported late.


def compile_layers() -> None:
    """Compile a layer, and what multiplies float32 rows with every format."""
    from engine.runner.cpu import common_kernels
    from engine.runner.kernels.products.group_product import few_rows_kernel, widening_kernel
    from engine.runner.kernels.products.panel_product import float_kernel

    common_kernels.compile_layers()
    common_kernels.compile_attention()
    float_kernel()
    for code in CODES.values():
        few_rows_kernel(code)
        widening_kernel(code)


def compile_draws_and_bytes() -> None:
    """Compile draws, copies of KV, and what multiplies int8 rows with every format."""
    from engine.runner.cpu import common_kernels
    from engine.runner.kernels.products.byte_product import byte_kernel

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


def main() -> None:
    beside = multiprocessing.get_context("spawn").Process(target=compile_draws_and_bytes)
    beside.start()
    compile_layers()
    beside.join()
    if beside.exitcode:
        raise SystemExit(f"compiling kernels of draws and bytes ended with {beside.exitcode}")
    load_demo_model()


if __name__ == "__main__":
    main()
