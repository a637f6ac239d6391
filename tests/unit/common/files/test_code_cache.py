"""Compiled kernels are code: a folder into which somebody else can put files is not used."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from common.files.code_cache import code_cache_folder

NOBODY = 65534
SOURCES = Path(__file__).parent
VARIABLES = ("XDG_CACHE_HOME", "PDSERVE_CACHE", "NUMBA_CACHE_DIR")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: folder.chmod(0o777),
        lambda folder: (folder / "inner").chmod(0o777),
        lambda folder: (folder / "inner/kernel.nbi").chmod(0o666),
        pytest.param(lambda folder: os.chown(folder, NOBODY, NOBODY), marks=needs_root),
        pytest.param(
            lambda folder: os.chown(folder / "inner/kernel.nbi", NOBODY, NOBODY), marks=needs_root
        ),
    ],
    ids=["folder", "inner folder", "file", "owner", "owner of a file"],
)
def test_what_others_can_write_is_not_loaded(
    cache: Path,
    variable: str,
    spoil: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(variable, str(cache))
    folder = Path(code_cache_folder(SOURCES))
    assert folder.is_relative_to(cache)
    (folder / "inner").mkdir()
    (folder / "inner/kernel.nbi").touch(0o644)
    assert code_cache_folder(SOURCES) == str(folder)
    assert caplog.records == []
    spoil(folder)
    with caplog.at_level(logging.WARNING):
        own = Path(code_cache_folder(SOURCES))
    assert own.parent == cache.parent
    assert list(own.iterdir()) == []
    assert own.stat().st_mode & 0o077 == 0
    assert f"compiled kernels are not taken from {folder}" in caplog.text
    assert "belongs to another user" in caplog.text or "everybody may write" in caplog.text


def test_a_folder_that_a_variable_names_may_be_one_of_all(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes makes an empty volume: what is made inside of it is this user's."""
    cache.chmod(0o777)
    for variable in VARIABLES:
        monkeypatch.setenv(variable, str(cache))
        is_used = Path(code_cache_folder(SOURCES)).is_relative_to(cache)
        assert is_used == (variable != "XDG_CACHE_HOME")
