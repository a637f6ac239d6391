"""The command's first lines, which run before what a command needs is loaded."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pdserve.__main__ import main, open_standard_streams
from tests.support.cluster.processes import SOURCES

_RUN = """
import os
import subprocess
import sys
from types import ModuleType
from pdserve.__main__ import main

ITS_STREAMS = "import os; [os.fstat(number) for number in range(3)]"

def run():
    subprocess.run([sys.executable, "-S", "-c", ITS_STREAMS], check=True)
    number = os.open("opened", os.O_WRONLY | os.O_CREAT)
    assert sys.stdin.read() == ""
    print("caf\\u00e9")
    print("said", file=sys.stderr)
    return number

loaded = sys.modules["pdserve.cli"] = ModuleType("pdserve.cli")
loaded.main = run
sys.exit(main())
"""


def _ended(
    folder: Path, redirected: str = "", stdout: int = subprocess.PIPE, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that prints, by a shell that redirects its streams."""
    environ = {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONUNBUFFERED": "", **environ}
    return subprocess.run(
        ["sh", "-c", f'"$0" -P -c "$1" {redirected}', sys.executable, _RUN],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_an_empty_one(closed: str, tmp_path: Path) -> None:
    ended = _ended(tmp_path, closed)
    assert ended.returncode > 2, ended.stderr
    assert (tmp_path / "opened").read_text() == ""
    assert ended.stdout == ("" if ">&-" in closed.replace("2>&-", "") else "caf\u00e9\n")
    assert ended.stderr == ("" if "2>&-" in closed else "said\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_is_full_is_said(tmp_path: Path, unbuffered: str) -> None:
    ended = _ended(tmp_path, "> /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert ended.returncode == 1
    said = "" if unbuffered else "said\n"  # which comes behind what cannot be written
    assert ended.stderr == (
        f"{said}pdserve: the output cannot be written: No space left on device\n"
    )


def test_a_pipe_without_a_reader_ends_a_command_without_a_word(tmp_path: Path) -> None:
    unread, output = os.pipe()
    os.close(unread)
    ended = _ended(tmp_path, stdout=output)
    os.close(output)
    assert (ended.returncode, ended.stderr) == (1, "said\n")


def test_a_character_that_the_output_cannot_show_is_replaced(tmp_path: Path) -> None:
    ended = _ended(tmp_path, PYTHONIOENCODING="ascii")
    assert ended.stdout == "caf?\n", ended.stderr


@pytest.mark.parametrize("encoding", ["ascii", "ANSI_X3.4-1968", "utf-8"])
def test_an_input_in_ascii_is_read_as_utf_8(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    typed = io.TextIOWrapper(io.BytesIO("Grüße\n".encode()), encoding, "surrogateescape")
    monkeypatch.setattr(sys, "stdin", typed)
    open_standard_streams()
    assert sys.stdin.read() == "Grüße\n"


def test_an_input_in_another_encoding_is_read_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = io.TextIOWrapper(io.BytesIO("Grüße\n".encode("latin-1")), "latin-1")
    monkeypatch.setattr(sys, "stdin", typed)
    open_standard_streams()
    assert sys.stdin.read() == "Grüße\n"


def test_modules_of_equal_names_elsewhere_are_not_taken(tmp_path: Path) -> None:
    for name in ("common", "router"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('another module')")
    command = [sys.executable, "-m", "pdserve", "--version"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.check_output(command, cwd=tmp_path, env=environ, text=True)


class _Interrupted(ModuleType):
    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt


def test_ctrl_c_while_the_command_is_loaded_ends_it_without_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pdserve.cli", _Interrupted("pdserve.cli"))
    assert main() == 130


_FIRST = """
import os, signal, sys
from types import ModuleType
from pdserve.__main__ import main

def run():
    os.kill(os.getpid(), signal.SIGTERM)
    print("goes on as process", os.getpid())
    return 0

loaded = sys.modules["pdserve.cli"] = ModuleType("pdserve.cli")
loaded.main = run
sys.exit(main())
"""


@pytest.mark.covers("M06")
@pytest.mark.parametrize("place", [("unshare", "-rp", "--fork"), ()], ids=["first", "other"])
def test_sigterm_while_the_command_is_loaded_ends_it(place: tuple[str, ...]) -> None:
    """The kernel ends the first process of a container by no signal that it does not handle."""
    if place and subprocess.run([*place, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no namespace of processes")
    command = [*place, sys.executable, "-P", "-c", _FIRST]
    environ = {**os.environ, "PYTHONPATH": str(SOURCES)}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ended.stdout == "", ended.stderr
    assert ended.returncode == (128 + signal.SIGTERM if place else -signal.SIGTERM)


def test_the_exit_code_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ModuleType("pdserve.cli")
    monkeypatch.setattr(loaded, "main", lambda: 7, raising=False)
    monkeypatch.setitem(sys.modules, "pdserve.cli", loaded)
    assert main() == 7


def test_a_plan_has_no_huge_pages() -> None:
    asked = """
import sys
from pdserve.cli import main
assert main(["plan", "--trace", "nosuch", "--ttft", "1", "--tpot", "1"]) == 2
import numpy
print(numpy._core.multiarray._get_madvise_hugepage())
"""
    environment = {**os.environ}
    environment.pop("NUMPY_MADVISE_HUGEPAGE", None)
    command = [sys.executable, "-c", asked]
    assert subprocess.check_output(command, env=environment, text=True) == "False\n"
