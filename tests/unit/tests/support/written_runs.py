"""Runs of tests that a test has written, in processes that take whole files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.tree import ROOT

_PLUGINS = (
    *("-p xdist", "-p pytest_timeout", "-p no:cacheprovider"),
    *("-p tests.support.whole_files", "-p tests.support.told_reports"),
)
ALWAYS = {
    "pytest.ini": f"[pytest]\naddopts = {' '.join(_PLUGINS)}\n",
    "noted.py": """
import os, pathlib
def note(what):
    with pathlib.Path(os.environ["NOTES"]).open("a") as notes:
        print(os.getpid(), what, file=notes)
""",
}


def run(
    files: dict[str, str], folder: Path, num_processes: int
) -> subprocess.CompletedProcess[str]:
    """Write files into a folder, and run their tests.

    Each line of the file `notes` there has the process that noted it, with `noted`, and what.
    """
    for name, text in (ALWAYS | files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    environ = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    # What else is installed takes as long to import as everything that such a run does.
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    path = os.pathsep.join((str(ROOT), str(folder)))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "tests", f"-n{num_processes}", "--dist=loadfile"],
        env=environ | {"PYTHONPATH": path, "NOTES": str(folder / "notes")},
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def notes(folder: Path) -> list[str]:
    """What was noted, in the order of time."""
    return [line.partition(" ")[2] for line in (folder / "notes").read_text().splitlines()]
