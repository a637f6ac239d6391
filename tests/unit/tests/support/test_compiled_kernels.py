"""Kernels are compiled before tests: once for the same sources, packages, processor and flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numba
import pytest

import engine.runner.kernels  # noqa: F401 - it names the folder
from tests.support import compiled_kernels


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often all was compiled; it takes no time."""
    times: list[None] = []
    monkeypatch.setattr(compiled_kernels, "compile_all", lambda: times.append(None))
    return times


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of the same folders, and an empty cache."""
    root = tmp_path / "sources"
    for folder in ("engine/runner/kernels", *compiled_kernels.SOURCES):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "one.py").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    real = compiled_kernels.stamp
    monkeypatch.setattr(compiled_kernels, "stamp", lambda: real(root))
    return root


def test_the_stamp_lies_beside_the_kernels() -> None:
    assert str(compiled_kernels.stamp().parent) == numba.config.CACHE_DIR


@pytest.mark.usefixtures("root")
def test_what_is_compiled_is_not_looked_at_again(compiled: list[None]) -> None:
    compiled_kernels.main()
    compiled_kernels.main()
    assert len(compiled) == 1


@pytest.mark.usefixtures("root")
def test_what_has_failed_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise SystemExit("no memory")

    monkeypatch.setattr(compiled_kernels, "compile_all", fails)
    for _ in range(2):
        with pytest.raises(SystemExit):
            compiled_kernels.main()


def write(source: Path) -> None:
    source.parent.mkdir(exist_ok=True)
    source.write_text("changed = True")


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "a kernel": lambda root, _: write(root / "engine/runner/kernels/one.py"),
    "what tests compile": lambda root, _: write(root / "tests/support/one.py"),
    "a new source": lambda root, _: write(root / "kv_transfer/lanes/two.py"),
    "a package": lambda _, patch: patch.setattr(compiled_kernels, "version", lambda _: "9.9"),
    "the processor": lambda _, patch: patch.setattr(
        compiled_kernels, "get_host_cpu_name", lambda: "z80"
    ),
    "a flag": lambda _, patch: patch.setenv("NUMBA_OPT", "0"),
    "the cache": lambda root, patch: patch.setenv("NUMBA_CACHE_DIR", str(root / "other")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_compiles_again(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    root: Path,
    compiled: list[None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled_kernels.main()
    change(root, monkeypatch)
    compiled_kernels.main()
    assert len(compiled) == 2
