"""What an everyday run leaves out of a test is tried by `make test-examples`."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.examples import everyday
from tests.unit.tree import ROOT, python_files

IMPORT = "from tests.support.examples import"


def tried_with_all_examples() -> list[Path]:
    """The files and folders that the target gives to pytest."""
    told = subprocess.run(
        ["make", "--dry-run", "test-examples"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (command,) = (line for line in told.splitlines() if "-m pytest" in line)
    assert "--hypothesis-profile=thorough" in command
    return [ROOT / word for word in shlex.split(command) if word.startswith("tests/")]


def test_every_file_that_takes_a_part_is_run_with_all() -> None:
    tried = tried_with_all_examples()
    tests = [path for path in python_files() if path.is_relative_to(ROOT / "tests")]
    parts = [path for path in tests if IMPORT in path.read_text()]
    files = [path for path in parts if path.name.startswith("test_")]
    assert len(files) > 30
    assert [path for path in files if not {path, *path.parents} & {*tried}] == []


@pytest.mark.parametrize(("profile", "tried"), [("pdserve", 2), ("thorough", 9), ("unshrunk", 9)])
def test_how_many_are_tried(profile: str, tried: int, monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(get_current_profile_name=lambda: profile)
    monkeypatch.setattr("tests.support.examples.settings", known)
    assert everyday(2, of=9) == tried
