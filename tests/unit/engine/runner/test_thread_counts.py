"""How many threads the kernels take."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import pytest

from engine.runner import paddle_import
from engine.runner.paddle_import import set_num_threads


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


@pytest.mark.covers("M01")
@pytest.mark.parametrize(("allowed", "taken"), [(1, 1), (1_000_000, None)])
def test_a_container_has_no_more_threads_than_cores(
    allowed: int, taken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paddle_import, "num_cores", lambda: allowed)
    set_num_threads(0)
    assert numba.get_num_threads() == (taken or numba.config.NUMBA_NUM_THREADS)


def test_a_number_that_was_set_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = numba.config.NUMBA_NUM_THREADS
    monkeypatch.setattr(paddle_import, "num_cores", lambda: 1)
    set_num_threads(all_of_them)
    assert numba.get_num_threads() == all_of_them
