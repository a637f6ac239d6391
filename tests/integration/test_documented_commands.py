"""Commands in README and the other pages: all parse, and those that take no machine run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from common.nodes import Role
from pdserve.configuration.config_sources import SERVE, UP, load_config
from pdserve.configuration.flags import build_parser
from pdserve.simulating.simulate_command import simulation_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PROGRAMS: tuple[str, ...] = (
    "cd",
    "cp",
    "curl",
    "docker",
    "echo",
    "helm",
    "kubectl",
    "make",
    "mkdir",
    "pdserve",
)
PROGRAMS = (*PROGRAMS, "pip", "python", "sudo")
# What a person fills in, or leaves out.
PLACEHOLDERS = {"…": "--role decode --model ./model", "NAME": "alice"}


def lines_of(page: Path) -> list[str]:
    """Return the shell commands of a page, each on one line with the lines that continue it."""
    text = page.read_text()
    blocks = [block for _, block in re.findall(r"^```(sh|bash)\n(.*?)^```", text, re.M | re.S)]
    for block in re.findall(r"(?:^    .*\n)+", text, re.M):
        if block.split()[0] in PROGRAMS and "```" not in block:
            blocks.append(re.sub(r"^    ", "", block, flags=re.M))
    lines: list[str] = []
    for block in blocks:
        open_line = ""
        for line in re.sub(r"(^|\s+)# .*$", "", block, flags=re.M).splitlines():
            open_line += line
            if line.endswith("\\"):
                open_line = open_line[:-1]
            elif open_line.count("'") % 2:
                open_line += " "
            elif open_line.strip():
                lines.append(open_line.strip())
                open_line = ""
        assert not open_line, f"{page.name}: a command without an end: {open_line}"
    return lines


COMMANDS = [(page.name, line) for page in PAGES for line in lines_of(page)]


def words_of(line: str) -> list[list[str]]:
    """Return the words of each simple command in a line; `$(…)` and redirections stay words."""
    for placeholder, value in PLACEHOLDERS.items():
        line = line.replace(placeholder, value)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|&;"):
            commands.append([])
        else:
            commands[-1].append(word)
    return [words for words in commands if words]


SIMPLE = [(name, words) for name, line in COMMANDS for words in words_of(line)]


def of_program(*program: str) -> list[list[str]]:
    return [words for _, words in SIMPLE if tuple(words[: len(program)]) == program]


def run_as_written(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line in `folder`, with this interpreter as `.venv` and `pdserve` from this checkout."""
    python, root = shlex.quote(sys.executable), shlex.quote(str(ROOT))
    preamble = (
        f'pdserve() {{ PYTHONPATH={root} {python} -m pdserve "$@"; }}\n'
        f"make() {{ command make --no-print-directory -C {root} -o env "
        f'BIN={shlex.quote(str(Path(sys.executable).parent))} "$@"; }}\n'
    )
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(
        ["bash", "-euc", preamble + line],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 60
    pages = {name for name, _ in COMMANDS}
    assert pages >= {"README.md", "SECURITY.md", "operations.md", "planning.md", "simulation.md"}


@pytest.mark.parametrize(("name", "line"), COMMANDS, ids=lambda value: value[:60])
def test_a_command_is_one_for_the_shell(name: str, line: str) -> None:
    said = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True, check=False)
    assert said.returncode == 0, f"{name}: {line}: {said.stderr}"


@pytest.mark.parametrize("words", of_program("pdserve"), ids=" ".join)
def test_a_pdserve_command_is_understood(words: list[str]) -> None:
    parsed, unknown = build_parser().parse_known_args(words[1:])
    if parsed.command == "simulate":
        simulation_of(vars(parsed))
    if parsed.command not in ("serve", "up", "check-config"):
        assert unknown == []
        return
    of_up = parsed.command == "up"
    role = Role.DECODE if of_up else None
    load_config(vars(parsed), unknown, {}, command=UP if of_up else SERVE, role=role)


def test_what_make_is_asked_for_is_a_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    targets.update(re.findall(r"\$\(MAKE\) ([a-z-]+)", (ROOT / "Makefile").read_text()))
    asked = [words[1:] for words in of_program("make")]
    assert asked
    for words in asked:
        names = {word for word in words if "=" not in word and not word.startswith("-")}
        assert names & targets, words
    for flags in re.findall(r'make up ARGS="([^"]+)"', (ROOT / "README.md").read_text()):
        test_a_pdserve_command_is_understood(["pdserve", "up", *flags.split()])


@pytest.mark.parametrize("words", of_program("python"), ids=" ".join)
def test_what_python_is_asked_for_is_there(words: list[str]) -> None:
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None
    else:
        assert (ROOT / words[1]).is_file()


@pytest.mark.parametrize("words", of_program("curl"), ids=lambda words: " ".join(words)[:60])
def test_the_body_of_a_request_is_json(words: list[str]) -> None:
    for flag, value in pairwise(words):
        if flag == "-d":
            json.loads(value)


def test_the_commands_of_an_installation_run(tmp_path: Path) -> None:
    (tmp_path / "compose").mkdir()
    lines = {line for name, line in COMMANDS if name == "from_one_machine_to_four.md"}
    for wanted in (
        "pdserve keys init compose/keys",
        'mkdir -p compose/models && cp -r "$(make -s demo-model)" compose/models/',
    ):
        assert wanted in lines
        done = run_as_written(wanted, tmp_path)
        assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "compose" / "models").iterdir()
    assert (folder / "config.json").is_file()
    assert (tmp_path / "compose" / "keys" / "client" / "api.key").is_file()


def test_a_key_is_added_as_the_page_says(tmp_path: Path) -> None:
    line = "pdserve keys init keys && pdserve api-keys add keys/router/api_keys.json NAME"
    done = run_as_written(line, tmp_path)
    assert done.returncode == 0, done.stderr
