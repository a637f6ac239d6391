"""The previous release's sources are taken out of the history, or it is said why not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.upgrade.release import NotInHistory, extract


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "package").mkdir()
    (folder / "package/code.py").write_text("old")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "old")
    return folder


def test_the_files_of_a_commit_are_written(repository: Path, tmp_path: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "package/code.py").write_text("new")
    sources = tmp_path / "releases/old"
    extract(repository, commit, sources)
    assert (sources / "package/code.py").read_text() == "old"
    assert list(sources.parent.iterdir()) == [sources]


def test_a_history_without_the_commit_is_said_so(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(NotInHistory, match="1" * 40):
        extract(repository, "1" * 40, tmp_path / "sources")
    assert not (tmp_path / "sources").exists()


def test_a_folder_without_a_history_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(NotInHistory):
        extract(tmp_path, "1" * 40, tmp_path / "sources")


def test_a_machine_without_git_is_said_so(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotInHistory, match="git is not installed"):
        extract(repository, "HEAD", tmp_path / "sources")
