"""Calls that are written down: what cannot be written changes nothing for who calls."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from common.recording.calls import recorded
from common.recording.file import RecordingFile


class Halves:
    """Halves even numbers."""

    def half(self, number: int) -> int:
        if number % 2:
            raise ValueError(f"{number} is odd")
        return number // 2


def test_calls_that_cannot_be_written_end_the_recording_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordingFile(tmp_path, "one", {})
    told: list[Any] = []

    def write(name: str, given: tuple[Any, ...], named: dict[str, Any], found: Any) -> None:
        told.append((name, given, named, str(found)))
        if len(told) == 2:
            raise TypeError("this cannot be recorded")

    halves = recorded(Halves(), ["half"], write, file)
    assert halves.half(8) == 4
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="7 is odd"):
        halves.half(7)
    assert not file.is_open
    assert "a call of half cannot be recorded" in caplog.text
    assert halves.half(number=6) == 3
    assert told == [("half", (8,), {}, "4"), ("half", (7,), {}, "7 is odd")]


def test_nothing_is_told_to_a_file_that_has_ended(tmp_path: Path) -> None:
    file = RecordingFile(tmp_path, "one", {}, most_bytes=1)
    told: list[Any] = []
    halves = recorded(Halves(), ["half"], lambda *call: told.append(call), file)
    assert halves.half(8) == 4
    assert told == []
