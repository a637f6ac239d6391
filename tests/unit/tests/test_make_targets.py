"""No time limit of a test includes compiling kernels, and progress is shown: `make` sees to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TARGET = re.compile(r"^(test[a-z-]*): ([a-z -]*)  ##.*\n((?:\t.*\n)+)", re.MULTILINE)
COMPUTES = re.compile(r"^\s*from (engine\.runner(?!\.gpu)|tests\.support\.cluster)\b", re.MULTILINE)
"""What imports these runs CPU kernels, or nodes that do."""

SAYS = re.compile(r"^from tests\.support\.commands import .*\bsay\b", re.MULTILINE)


def targets() -> dict[str, tuple[list[str], str]]:
    """Return what each test target requires, and its commands with its variables replaced."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    values = dict(re.findall(r"^([A-Z_]+) :?= (.*)$", makefile, re.MULTILINE))
    found = {}
    for name, required, commands in TARGET.findall(makefile):
        for variable, text in values.items():
            commands = commands.replace(f"$({variable})", text)
        found[name] = (required.split(), commands)
    return found


def folders(commands: str) -> list[Path]:
    """Return the folders of tests that commands run with pytest's time limits."""
    if "--quick" in commands:
        return []
    named = re.findall(r"\btests/[a-z_]+|-m tests\.page\b", commands)
    return [ROOT / one.removeprefix("-m ").replace(".", "/") for one in named]


def test_targets_are_found() -> None:
    assert {"test", "test-page", "test-endurance", "test-quick"} <= targets().keys()


@pytest.mark.parametrize("name", targets())
def test_tests_that_compute_find_their_kernels_compiled(name: str) -> None:
    required, commands = targets()[name]
    sources = [path for folder in folders(commands) for path in folder.rglob("*.py")]
    computes = [one.name for one in sources if COMPUTES.search(one.read_text(encoding="utf-8"))]
    assert not computes or "compiled-kernels" in required, computes[:5]


@pytest.mark.parametrize("name", targets())
def test_progress_is_shown_by_suites_that_tell_it(name: str) -> None:
    """What `say` prints goes past pytest's capture of `sys.stderr`, not of the descriptor."""
    _, commands = targets()[name]
    sources = [path for folder in folders(commands) for path in folder.glob("*.py")]
    tells = [one.name for one in sources if SAYS.search(one.read_text(encoding="utf-8"))]
    assert not tells or "--capture=sys" in commands, tells
