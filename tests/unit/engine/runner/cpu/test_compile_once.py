"""Kernels are compiled by one process, and the others wait for it."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import numba
import pytest

from engine.runner.cpu.compile_once import alone_on_machine, compile_once, compile_together


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    return tmp_path / "numba"


def test_a_second_one_waits_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock belongs to an open file, so a thread stands for a process."""
    order: list[str] = []
    waiting = threading.Event()
    monkeypatch.setattr("common.files.cache_folder.time.sleep", lambda _: waiting.set())

    def second() -> None:
        with compile_once("kernels"):
            order.append("second")

    thread = threading.Thread(target=second)
    with compile_once("kernels"):
        thread.start()
        assert waiting.wait(30)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_what_is_compiled_takes_no_lock(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with compile_once("kernels"):
        pass
    monkeypatch.setattr(
        "engine.runner.cpu.compile_once.locked", lambda _: pytest.fail("waits for nothing")
    )
    with compile_once("kernels"), compile_once("kernels"):
        pass


def test_what_was_compiled_from_other_files_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is named after the sources, and a copy of them elsewhere has the same one."""
    compiled: list[str] = []
    for name in ("these", "others", "these"):
        monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / name))
        compile_together({"layers": partial(compiled.append, name)})
    assert compiled == ["these", "others"]


def test_a_second_one_compiles_what_the_first_does_not(cache: Path) -> None:
    """The first holds "layers": the second compiles "draws" meanwhile, then waits."""
    order: list[str] = []
    drawn, layers_taken = threading.Event(), threading.Event()

    def slow_layers() -> None:
        layers_taken.set()
        assert drawn.wait(30)
        order.append("layers of the first")

    def draws() -> None:
        order.append("draws of the second")

    def unwanted() -> None:
        order.append("compiled twice")

    def second() -> None:
        compile_together({"layers": unwanted, "draws": draws})

    first = threading.Thread(
        target=compile_together, args=({"layers": slow_layers, "draws": unwanted},)
    )
    first.start()
    assert layers_taken.wait(30)
    waiting = threading.Thread(target=second)
    waiting.start()
    while not order:  # the second one must not wait for the first
        assert waiting.is_alive()
        drawn.wait(0.01)
    drawn.set()
    first.join(30)
    waiting.join(30)
    assert order == ["draws of the second", "layers of the first"]
    compile_together({"layers": unwanted, "draws": unwanted})
    assert len(order) == len(list(cache.glob("*.compiled"))) == 2


def test_other_kernels_are_compiled_beside_them() -> None:
    with compile_once("kernels of Q4_1"), compile_once("kernels of Q8_0"):
        pass


def test_after_a_failure_the_next_one_compiles(cache: Path) -> None:
    with pytest.raises(ValueError, match="broken"), compile_once("kernels"):
        raise ValueError("broken")
    assert not list(cache.glob("*.compiled"))
    with compile_once("kernels"):
        pass
    assert list(cache.glob("*.compiled"))


def test_a_cache_that_cannot_be_written_is_no_error(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the folder should be")
    ran = []
    with compile_once("kernels"):
        ran.append(True)
    assert ran
    assert "not shared with other processes" in caplog.text


def test_one_process_measures_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    waiting = threading.Event()
    monkeypatch.setattr("common.files.cache_folder.time.sleep", lambda _: waiting.set())

    def second() -> None:
        with alone_on_machine():
            order.append("second")

    thread = threading.Thread(target=second)
    with alone_on_machine():
        thread.start()
        assert waiting.wait(30)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_a_process_that_does_not_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.runner.cpu.compile_once._ALONE_WAIT_S", 0.0)
    ran = []
    with alone_on_machine():
        other = threading.Thread(target=lambda: ran.append(_measured_beside()))
        other.start()
        other.join(30)
    assert ran == [True]
    assert "another process has held it for 0 s" in caplog.text


def _measured_beside() -> bool:
    with alone_on_machine():
        return True


def test_where_nothing_can_be_locked_steps_are_measured_anyway(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the folder should be")
    ran = []
    with alone_on_machine():
        ran.append(True)
    assert ran
    assert "measured beside other processes" in caplog.text


def test_what_fails_alone_passes_its_error_on_and_lets_the_next_one_run() -> None:
    with pytest.raises(ValueError, match="broken"), alone_on_machine():
        raise ValueError("broken")
    with alone_on_machine():
        pass
