"""Each file of a distributed run is imported by one process alone, when it is the file's turn."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.whole_files import takes_whole_files
from tests.unit.tests.support.written_runs import notes, run

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
    (first,) = (noted for noted in of_processes.values() if "import a" in noted)
    assert [what for what in first if not what.endswith((" c", " c 1", " c 2"))] == OF_EQUALITY
    assert sum(noted.count("import c") for noted in of_processes.values()) == 1


def run_a_file_without_tests(folder: Path, at_end: str) -> subprocess.CompletedProcess[str]:
    """Run two folders of tests; the last file of the first has none, and its fixture ends thus."""
    files = {
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
    noted = notes(tmp_path)
    assert noted.index("end one") < noted.index("run b 1")


def test_a_fixture_that_fails_to_end_after_a_file_without_tests_is_an_error(tmp_path: Path) -> None:
    ran = run_a_file_without_tests(tmp_path, at_end="assert 0")
    assert "4 passed, 1 error in" in ran.stdout, ran.stdout + ran.stderr
    assert "ERROR tests/one/test_empty.py" in ran.stdout


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
