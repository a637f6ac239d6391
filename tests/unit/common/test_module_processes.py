"""How modules of this project are run as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.child_process import module_command, module_environment, start_helper
from tests.support.cluster.processes import SOURCES

PACKAGES = ("common", "engine", "grammars", "http_serving", "kv_transfer", "node", "pdserve")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder, and one of PYTHONPATH, with files that are named like modules."""
    for name in ("common", "json", "grammars"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_of_the_current_folder_are_no_modules(elsewhere: Path) -> None:
    command = module_command("common.version", "argument")
    assert command[0] == sys.executable
    subprocess.run(command, env=module_environment(), check=True)


def test_this_project_comes_before_what_others_name(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "json.py").unlink()
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    subprocess.run(module_command("common.version"), env=module_environment(), check=True)
    assert module_environment()["PYTHONPATH"].split(os.pathsep)[1:] == [str(elsewhere)]


def test_helpers_find_this_project_first(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere / "json.py").unlink()
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    process, ours = start_helper(module_command("common.version"))
    ours.close()
    assert process.wait() == 0


def test_nothing_runs_modules_in_another_way() -> None:
    runs = [
        path
        for package in (*PACKAGES, "placement", "protos", "router", "simulator")
        for path in (SOURCES / package).rglob("*.py")
        if '"-m", ' in (text := path.read_text()) and '"-P", "-m", ' not in text
    ]
    assert runs == []
