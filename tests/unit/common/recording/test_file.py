"""The file of a recording: bounded, its owner's alone, and no reason for a process to fail."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.recording.file import RecordingFile, is_recording, read_recording


def begun(folder: Path, **bounds: int) -> RecordingFile:
    return RecordingFile(folder, "n", {"of": "steps"}, **bounds)


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = begun(tmp_path / "new" / "folder")
    file.write({"call": "on_time"})
    file.write({"call": "report"})
    file.close()
    file.close()
    assert file.path == tmp_path / "new" / "folder" / "n.jsonl"
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o077 == 0
    header, lines = read_recording(file.path)
    assert (header["recording"], header["of"]) == (1, "steps")
    assert [(number, line["call"]) for number, line in lines] == [(2, "on_time"), (3, "report")]
    assert is_recording(file.path)


def test_the_file_of_a_process_that_was_killed_at_once_is_a_recording(tmp_path: Path) -> None:
    file = begun(tmp_path)
    assert is_recording(file.path)
    header, lines = read_recording(file.path)
    assert (header["of"], list(lines)) == ("steps", [])
    file.close()


def test_a_folder_that_is_a_file_is_named_as_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ConfigError, match="file': wanted a folder"):
        begun(path)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    for name in ("n.jsonl", "n.2.jsonl", "n.3.jsonl"):
        file = begun(tmp_path)
        file.close()
        assert file.path.name == name


def test_a_full_recording_ends_with_a_whole_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = begun(tmp_path, most_bytes=1000)
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            file.write({"call": number})
    assert file.path.stat().st_size < 1100
    (warning,) = caplog.messages
    assert warning.endswith("is full: it ends here")
    _, lines = read_recording(file.path)
    calls = [line["call"] for _, line in lines]
    assert 10 < len(calls) < 100
    assert calls == list(range(len(calls)))


class FullDisk:
    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = begun(tmp_path)
    file.write({"call": 1})
    file.close()
    disk: Any = FullDisk()
    monkeypatch.setattr(file, "_file", disk)
    for number in range(3):
        file.write({"call": number})
    assert len(caplog.messages) == 2
    assert "ends here: No space left on device" in caplog.messages[0]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    file = begun(tmp_path)
    file.write({"call": 1})
    file.close()
    with file.path.open("a") as more:
        more.write('{"call": 2, "at_')
    _, lines = read_recording(file.path)
    assert [line["call"] for _, line in lines] == [1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is no recording of format 1"),
        ('{"recording": 7}\n', "is no recording of format 1"),
        ("[]\n", "line 1: wanted an object"),
        ("{\n", "line 1: Expecting property name"),
        ('{"recording": "ü"}\n', "ordinal not in range"),
    ],
)
def test_other_files_are_named(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        read_recording(path)


def test_a_bad_line_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"recording": 1}) + '\n{"call": 1}\nnull\n')
    _, lines = read_recording(path)
    assert next(lines) == (2, {"call": 1})
    with pytest.raises(ConfigError, match="line 3: wanted an object"):
        next(lines)


def test_a_file_that_is_not_there_is_no_recording(tmp_path: Path) -> None:
    assert not is_recording(tmp_path / "none")
    with pytest.raises(ConfigError, match="No such file"):
        read_recording(tmp_path / "none")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        begun(tmp_path / "file" / "folder")
