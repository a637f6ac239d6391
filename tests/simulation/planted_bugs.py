"""Plants bugs in the code that serves, one at a time, and counts the histories until each is found.

    python -m tests.simulation.planted_bugs [--most N] [--only TEXT] [--seed S]

Each bug is planted in a process of its own, where the module is imported from changed source.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tests.simulation.bugs_beside_answers import BESIDE
from tests.simulation.bugs_of_demand import DEMAND
from tests.simulation.bugs_to_plant import BUGS as OTHERS
from tests.simulation.bugs_to_plant import Bug

BUGS = [*OTHERS, *DEMAND, *BESIDE]
MOST_HISTORIES = 3000
ROOT = Path(__file__).parents[2]


class Found(NamedTuple):
    """How many histories were run, and what was wrong in the last one; empty: nothing was."""

    num_histories: int
    wrong: str


class _Loader(importlib.machinery.SourceFileLoader):
    bug: Bug

    def get_data(self, path: str) -> bytes:
        text = super().get_data(path).decode()
        if text.count(self.bug.old) != 1:
            raise ValueError(f"{self.bug.name}: its source is there {text.count(self.bug.old)}x")
        return text.replace(self.bug.old, self.bug.new).encode()

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._bug.module:
            return None
        loader = _Loader(fullname, str(ROOT / Path(*fullname.split("."))) + ".py")
        loader.bug = self._bug
        return importlib.util.spec_from_file_location(fullname, loader.path, loader=loader)


def plant(bug: Bug) -> None:
    """Have the module imported with this bug; it must not be imported yet."""
    assert bug.module not in sys.modules, "it is imported without the bug"
    sys.meta_path.insert(0, _Finder(bug))


def histories_until_found(bug: Bug, most: int, seed: int) -> Found:
    """Run histories in a process of their own until one is wrong."""
    command = [sys.executable, "-m", "tests.simulation.planted_bugs", "--planted", bug.name]
    run = subprocess.run(
        [*command, "--most", str(most), "--seed", str(seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(run.stderr)
    return Found(*json.loads(run.stdout))


def _search(bug: Bug, most: int, seed: int) -> Found:
    plant(bug)
    from simulator.faults.kinds import FaultKind
    from simulator.faults.search import first_wrong

    return Found(*first_wrong(seed, most, bug.faults or tuple(FaultKind)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the histories until each bug is found.")
    parser.add_argument("--most", type=int, default=MOST_HISTORIES)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--planted", default="", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.planted:
        bug = next(one for one in BUGS if one.name == parsed.planted)
        print(json.dumps(_search(bug, parsed.most, parsed.seed)))
        return 0
    chosen = [one for one in BUGS if parsed.only in f"{one.name} {one.module}"]
    missed = 0
    for bug in chosen:
        found = histories_until_found(bug, parsed.most, parsed.seed)
        missed += not found.wrong
        number = str(found.num_histories) if found.wrong else f"not in {found.num_histories}"
        print(f"| {bug.name} | `{bug.module}` | {number} |", flush=True)
        print(f"    {found.wrong}", file=sys.stderr, flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found", file=sys.stderr)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
