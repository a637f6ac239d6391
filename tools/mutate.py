"""Break the engine's core, the nodes and the KV transfer in small ways, and see that tests notice.

Usage: python tools/mutate.py [--only PATTERN] [--jobs NUMBER]

`mutants.toml` lists, for each file, the tests that must notice, and its mutants: a line of the file
and the line that replaces it (`function` names the one that has the line, if several have). A
mutant is killed when a test fails or runs out of time, else it has survived. One that is marked
`equivalent`, with the reason, changes no behaviour and must survive.

`--only` takes the mutants with the pattern in their path, their line or what it becomes. Each of
the `--jobs` (2) processes works in a temporary copy of the tree. The tests of a file must pass
before it is mutated. Takes minutes. Exits with 1 when a mutant survived that should not, and with 2
when the list does not fit the tree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = ROOT / "tools" / "mutants.toml"
TEST_TIMEOUT_S = 90
"""One test: a mutant may run forever, and the machine may be busy."""
RUN_TIMEOUT_S = 600


class BadMutants(Exception):
    """The list of mutants does not fit the tree, or its tests fail without a mutant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One changed line of `path`.

    `function` is the one with the line, empty where the file has the line once. `equivalent`: why
    no test can notice; empty for most.
    """

    path: str
    line: str
    becomes: str
    tests: tuple[str, ...]
    function: str = ""
    equivalent: str = ""

    @property
    def name(self) -> str:
        """The file and the change."""
        return f"{self.path}: {self.line} => {self.becomes}"


def read_mutants(text: str, pattern: str = "") -> list[Mutant]:
    """Return the mutants listed in `text` that have `pattern` in their name.

    Raises `BadMutants` when there is none, or an entry has an unknown or a missing field.
    """
    found = []
    for path, entry in tomllib.loads(text).items():
        try:
            found += [
                Mutant(path=path, tests=tuple(entry["tests"]), **fields)
                for fields in entry["mutants"]
            ]
        except (KeyError, TypeError) as error:
            raise BadMutants(f"the mutants of {path} are malformed: {error}") from error
    chosen = [mutant for mutant in found if pattern in mutant.name]
    if not chosen:
        raise BadMutants(f"none of {len(found)} mutants has {pattern!r} in its name")
    return chosen


def mutated(text: str, mutant: Mutant) -> str:
    """Return a file's `text` with the mutant's line replaced; the indentation stays.

    Raises `BadMutants` unless the line occurs exactly once, in the mutant's function if it names
    one, and for a mutant that changes nothing.
    """
    lines = text.splitlines(keepends=True)
    places, function = [], ""
    for i, line in enumerate(lines):
        if line.lstrip().startswith(("def ", "async def ")):
            function = line.split("(")[0].split()[-1]
        if line.strip() == mutant.line and mutant.function in ("", function):
            places.append(i)
    if len(places) != 1:
        raise BadMutants(
            f"{mutant.path} has the line {mutant.line!r} {len(places)} times: wanted 1"
        )
    if mutant.becomes == mutant.line:
        raise BadMutants(f"{mutant.path}: {mutant.line!r} becomes itself")
    (place,) = places
    lines[place] = lines[place].replace(mutant.line, mutant.becomes)
    return "".join(lines)


def verdict(mutant: Mutant, *, is_killed: bool) -> str:
    """Return how a mutant ended, in words; those that begin with "!" should not be."""
    if mutant.equivalent:
        return "! killed, though equivalent" if is_killed else "equivalent"
    return "killed" if is_killed else "! survived"


def check_list(mutants: Iterable[Mutant], root: Path) -> None:
    """Raise `BadMutants` that names every mutant whose line is not in its file under `root`."""
    problems = []
    for mutant in mutants:
        try:
            mutated((root / mutant.path).read_text(), mutant)
        except (BadMutants, OSError) as error:
            problems.append(str(error))
    if problems:
        raise BadMutants("\n".join(problems))


class TreeCopy:
    """A copy of the tree's files, those that git ignores left out."""

    def __init__(self, folder: Path) -> None:
        """Copy the tree into the empty `folder`."""
        self._folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def passes(self, tests: Sequence[str]) -> bool:
        """Return whether these tests pass, each within its time."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["--hypothesis-profile=unshrunk"]
        try:
            ended = subprocess.run(  # noqa: S603 (the tests of mutants.toml, no shell)
                [*command, f"--timeout={TEST_TIMEOUT_S}", *tests],
                cwd=self._folder, env=os.environ | {"PYTHONPATH": str(self._folder)},
                capture_output=True, timeout=RUN_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return ended.returncode == 0

    def kills(self, mutant: Mutant) -> bool:
        """Return whether a test notices the mutant; the copy is as before afterwards."""
        path = self._folder / mutant.path
        text = path.read_text()
        self._write(path, mutated(text, mutant))
        try:
            # One path at a time, as `check_tests` does: all of them together may run out of time.
            return not all(self.passes([path]) for path in mutant.tests)
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # Compiled code is told from the source by size and seconds alone: both may be the same.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()


class Run:
    """One run over a list of mutants, with some copies of the tree in turn."""

    def __init__(self, mutants: Sequence[Mutant], copies: Sequence[TreeCopy]) -> None:
        self._mutants = mutants
        self._copies: SimpleQueue[TreeCopy] = SimpleQueue()
        for copy in copies:
            self._copies.put(copy)
        self._pool = ThreadPoolExecutor(len(copies))

    def check_tests(self) -> None:
        """Raise `BadMutants` when tests fail without a mutant. Each path runs once."""
        paths = list(dict.fromkeys(path for mutant in self._mutants for path in mutant.tests))
        for path, is_passed in zip(paths, self._pool.map(self._passes, paths), strict=True):
            if not is_passed:
                raise BadMutants(f"these tests fail without a mutant: {path}")

    def verdicts(self) -> list[str]:
        """Print each mutant's verdict as it comes, in order, and return them."""
        found = []
        for mutant, is_killed in zip(
            self._mutants, self._pool.map(self._kills, self._mutants), strict=True
        ):
            found.append(verdict(mutant, is_killed=is_killed))
            print(f"{found[-1]}: {mutant.name}", flush=True)
        return found

    def _passes(self, path: str) -> bool:
        copy = self._copies.get()
        try:
            return copy.passes([path])
        finally:
            self._copies.put(copy)

    def _kills(self, mutant: Mutant) -> bool:
        copy = self._copies.get()
        try:
            return copy.kills(mutant)
        finally:
            self._copies.put(copy)


def closing_line(verdicts: Sequence[str], seconds: float) -> str:
    """Return the counts of a run."""
    num_killed, num_equivalent = verdicts.count("killed"), verdicts.count("equivalent")
    num_bad = len(verdicts) - num_killed - num_equivalent
    return (
        f"{num_killed} of {len(verdicts)} mutants killed, {num_equivalent} equivalent, "
        f"{num_bad} not as they should be, in {seconds:.0f} s"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the chosen mutants, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="part of a mutant's name")
    parser.add_argument("--jobs", default=2, type=int, metavar="NUMBER", help="processes at once")
    options = parser.parse_args(arguments)
    began_at_s = time.monotonic()
    try:
        mutants = read_mutants(MUTANTS.read_text(), options.only)
        check_list(mutants, ROOT)
        with ExitStack() as folders:
            copies = [
                TreeCopy(Path(folders.enter_context(tempfile.TemporaryDirectory())))
                for _ in range(max(options.jobs, 1))
            ]
            run = Run(mutants, copies)
            run.check_tests()
            verdicts = run.verdicts()
    except BadMutants as error:
        print(error, file=sys.stderr)
        return 2
    print(closing_line(verdicts, time.monotonic() - began_at_s))
    return 1 if any(one.startswith("!") for one in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
