"""Buffers of steps are planned for as a whole, and take memory as steps use them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from engine.runner.cpu.step_buffers import StepBuffers

MIB = 1 << 20


def resident_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def test_pages_are_taken_returned_and_taken_again() -> None:
    before, made = resident_bytes(), StepBuffers()
    rows = made.rows(1024, 16 * 1024)
    assert made.num_bytes == 64 * MIB
    assert resident_bytes() - before < 8 * MIB
    made.take()
    assert resident_bytes() - before > 60 * MIB
    made.release()
    assert resident_bytes() - before < 8 * MIB
    assert not rows.first(2).any()
    rows.first(2)[:] = 2.0
    np.testing.assert_array_equal(rows.first(2), 2.0)
    assert resident_bytes() - before < 8 * MIB


def test_a_buffer_without_values() -> None:
    made = StepBuffers()
    rows = made.rows(8, 0)
    made.take()
    made.release()
    assert rows.first(8).shape == (8, 0)
    assert made.num_bytes == 0
