"""A kernel that one process compiles while another compiles a second is never loaded as it."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numba
import pytest

from engine.runner.kernels.compiled import compiled_address
from engine.runner.kernels.products import byte_product, group_product
from engine.runner.kernels.products.group_layout import CODES
from tests.support.models.byte_kernels import EVERY


def test_every_form_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba numbers those of one function, without a lock: two processes may use one number."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def make(form: str) -> int:
        number = len(form)

        def kernel(a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
            a + number

        return compiled_address(kernel, form)

    for num_forms, form in enumerate(("Q8_0", "Q8_0_fine", "Q8_0"), 1):
        make(form)
        num_files = min(num_forms, 2)
        found = sorted(path.suffix for path in tmp_path.rglob("*.nb?"))
        assert found == [".nbc"] * num_files + [".nbi"] * num_files


def test_no_two_kernels_of_a_function_are_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    numbers = count(1)

    def note(kernel: Any, form: str) -> int:
        asked.append((kernel.__qualname__, form))
        return next(numbers)

    for module in (group_product, byte_product):
        monkeypatch.setattr(module, "compiled_address", note)
    for name, is_fine, instruction in EVERY:
        # Not from the cache of what this process has made.
        byte_product.byte_kernel.__wrapped__(CODES[name], instruction, is_fine=is_fine)
    for code in CODES.values():
        group_product.few_rows_kernel.__wrapped__(code)
        group_product.widening_kernel.__wrapped__(code)
    assert len(set(asked)) == len(asked) == len(EVERY) + 2 * len(CODES)
