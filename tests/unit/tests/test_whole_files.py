"""Each file of a distributed run is imported by one process alone, when it is the file's turn."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.whole_files import is_told, takes_whole_files
from tests.unit.tree import ROOT

NOTED = """
import os, pathlib
def note(what):
    with pathlib.Path(os.environ["NOTES"]).open("a") as notes:
        print(os.getpid(), what, file=notes)
"""
FIXTURE = """
import pytest
from noted import note
@pytest.fixture(scope="{scope}", autouse=True)
def fixture_of_{name}():
    note("begin {name}")
    yield
    note("end {name}")
"""
TWO_TESTS = """
import pytest
from noted import note
note("import {name}")
@pytest.mark.parametrize("number", [1, 2])
def test_it(number):
    note(f"run {name} {{number}}")
    assert number <= {most}
"""
FILES = {
    "pytest.ini": "[pytest]\naddopts = -p tests.support.whole_files -p no:cacheprovider\n",
    "noted.py": NOTED,
    "tests/equality/__init__.py": "",
    "tests/equality/conftest.py": FIXTURE.format(scope="package", name="equality"),
    "tests/equality/test_a.py": TWO_TESTS.format(name="a", most=2),
    "tests/equality/test_b.py": FIXTURE.format(scope="module", name="the module b").replace(
        "fixture_of_the module b", "fixture_of_b"
    )
    + TWO_TESTS.format(name="b", most=2),
    "tests/unit/test_c.py": TWO_TESTS.format(name="c", most=1),
    "tests/unit/test_broken.py": "import nothing_of_this_name",
    "tests/unit/test_skipped.py": "import pytest\npytest.skip('no', allow_module_level=True)",
    "tests/unit/test_empty.py": "",
}
OF_EQUALITY = [
    "import a",
    "begin equality",
    "run a 1",
    "run a 2",
    "import b",
    "begin the module b",
    "run b 1",
    "run b 2",
    "end the module b",
    "end equality",
]


def run(
    files: dict[str, str], folder: Path, num_processes: int
) -> subprocess.CompletedProcess[str]:
    """Write files into a folder, and run their tests in processes that take whole files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    environ = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    path = os.pathsep.join((str(ROOT), str(folder)))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "tests", f"-n{num_processes}", "--dist=loadfile"],
        env=environ | {"PYTHONPATH": path, "NOTES": str(folder / "notes")},
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_each_file_is_imported_once_and_its_fixtures_end_with_it(tmp_path: Path) -> None:
    ran = run(FILES, tmp_path, num_processes=2)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "1 failed, 5 passed, 1 skipped, 1 error in" in ran.stdout, ran.stdout
    assert "FAILED tests/unit/test_c.py::test_it[2]" in ran.stdout
    assert "No module named 'nothing_of_this_name'" in ran.stdout
    of_processes = defaultdict[str, list[str]](list)
    for line in (tmp_path / "notes").read_text().splitlines():
        process, _, what = line.partition(" ")
        of_processes[process].append(what)
    (first,) = (notes for notes in of_processes.values() if "import a" in notes)
    assert [what for what in first if not what.endswith((" c", " c 1", " c 2"))] == OF_EQUALITY
    assert sum(notes.count("import c") for notes in of_processes.values()) == 1


def run_a_file_without_tests(folder: Path, at_end: str) -> subprocess.CompletedProcess[str]:
    """Run two folders of tests; the last file of the first has none, and its fixture ends thus."""
    files = {
        "pytest.ini": FILES["pytest.ini"],
        "noted.py": NOTED,
        "tests/one/__init__.py": "",
        "tests/one/conftest.py": FIXTURE.format(scope="package", name="one") + f"    {at_end}\n",
        "tests/one/test_a.py": TWO_TESTS.format(name="a", most=2),
        "tests/one/test_empty.py": "",
        "tests/two/test_b.py": TWO_TESTS.format(name="b", most=2),
    }
    return run(files, folder, num_processes=1)


def test_fixtures_of_a_folder_end_where_its_last_file_has_no_tests(tmp_path: Path) -> None:
    ran = run_a_file_without_tests(tmp_path, at_end="pass")
    assert "4 passed in" in ran.stdout, ran.stdout + ran.stderr
    notes = [line.partition(" ")[2] for line in (tmp_path / "notes").read_text().splitlines()]
    assert notes.index("end one") < notes.index("run b 1")


def test_a_fixture_that_fails_to_end_after_a_file_without_tests_is_an_error(tmp_path: Path) -> None:
    ran = run_a_file_without_tests(tmp_path, at_end="assert 0")
    assert "4 passed, 1 error in" in ran.stdout, ran.stdout + ran.stderr
    assert "ERROR tests/one/test_empty.py" in ran.stdout


TOLD = """
import os
from noted import note
def pytest_runtest_logstart():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        note("told of a start")
def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        note(f"told {report.when} {report.nodeid.partition('::')[2]}")
"""
SLOW_TO_BEGIN = """
import time, pytest
@pytest.fixture
def slow():
    time.sleep(0.02)
def test_slow(slow):
    pass
def test_brief():
    pass
"""


def test_of_tests_that_pass_only_what_is_printed_is_told(tmp_path: Path) -> None:
    files = {
        "pytest.ini": FILES["pytest.ini"],
        "noted.py": NOTED,
        "conftest.py": TOLD,
        "tests/test_a.py": SLOW_TO_BEGIN,
    }
    ran = run(files, tmp_path, num_processes=1)
    assert "2 passed in" in ran.stdout, ran.stdout + ran.stderr
    told = [line.partition(" ")[2] for line in (tmp_path / "notes").read_text().splitlines()]
    assert {"told setup test_slow", "told call test_slow", "told call test_brief"} <= set(told)
    assert "told of a start" not in told


def report(**fields: Any) -> dict[str, Any]:
    brief = {"when": "setup", "outcome": "passed", "duration": 0.001, "sections": []}
    return {"data": brief | fields}


@pytest.mark.parametrize(
    ("name", "event", "told"),
    [
        ("logstart", {}, False),
        ("logfinish", {}, False),
        ("testreport", report(), False),
        ("testreport", report(when="teardown"), False),
        ("testreport", report(when="call"), True),
        ("testreport", report(outcome="failed"), True),
        ("testreport", report(outcome="skipped"), True),
        ("testreport", report(when="teardown", outcome="failed"), True),
        ("testreport", report(duration=0.005), True),
        ("testreport", report(sections=[("Captured log setup", "late")]), True),
        ("runtest_protocol_complete", {}, True),
        ("warning_recorded", {}, True),
    ],
)
def test_what_is_told(name: str, event: dict[str, Any], told: bool) -> None:
    assert is_told(name, event) is told


@pytest.mark.parametrize(
    ("options", "args", "taken"),
    [
        ({}, ["tests"], True),
        ({}, ["tests/unit/test_a.py", "tests/property"], True),
        ({"dist": "load"}, ["tests"], False),
        ({"keyword": "placement"}, ["tests"], False),
        ({"markexpr": "gpu"}, ["tests"], False),
        ({"lf": True}, ["tests"], False),
        ({}, ["tests/unit/test_a.py::test_it"], False),
    ],
)
def test_a_run_that_chooses_tests_collects_them_first(
    options: dict[str, Any], args: list[str], taken: bool
) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(**{"dist": "loadfile", **options}))
    config.args = args
    assert takes_whole_files(config) is taken
