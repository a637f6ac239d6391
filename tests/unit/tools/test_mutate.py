"""How `tools/mutate.py` reads its list, changes a line, refuses what is stale, and judges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools.mutate import (
    ROOT,
    BadMutants,
    Mutant,
    check_list,
    closing_line,
    mutated,
    read_mutants,
    verdict,
)

TEXT = "def least(a, b):\n    if a < b:\n        return a\n    return b\n"
LIST = """
["engine/core/one.py"]
tests = ["tests/unit/one", "tests/property"]
mutants = [
  { line = 'if a < b:', becomes = 'if a <= b:', equivalent = 'equal numbers are alike' },
  { line = 'return b', becomes = 'return a' },
]

["node/other.py"]
tests = ["tests/unit/node"]
mutants = [{ line = 'x = "y"', becomes = 'x = ""' }]
"""


def mutant(line: str, becomes: str = "pass", path: str = "one.py") -> Mutant:
    return Mutant(path=path, line=line, becomes=becomes, tests=("tests/unit",))


def test_the_list_is_read_by_file() -> None:
    first, second, third = read_mutants(LIST)
    assert first == Mutant(
        path="engine/core/one.py",
        line="if a < b:",
        becomes="if a <= b:",
        tests=("tests/unit/one", "tests/property"),
        equivalent="equal numbers are alike",
    )
    assert (second.path, second.line, second.equivalent) == (first.path, "return b", "")
    assert (third.path, third.line, third.tests) == (
        "node/other.py",
        'x = "y"',
        ("tests/unit/node",),
    )
    assert read_mutants(LIST, "node/") == [third]
    assert read_mutants(LIST, "a <= b") == [first]


@pytest.mark.parametrize(
    ("text", "pattern", "problem"),
    [
        (LIST, "nowhere", "none of 3 mutants has 'nowhere' in its name"),
        ("", "", "none of 0 mutants"),
        ('["a.py"]\ntests = []\n', "", "a.py are malformed: 'mutants'"),
        ('["a.py"]\ntests = []\nmutants = [{ line = "x" }]\n', "", "a.py are malformed.*becomes"),
        (
            '["a.py"]\ntests = []\nmutants = [{ line = "x", becomes = "", why = "" }]\n',
            "",
            "a.py are malformed.*why",
        ),
    ],
)
def test_a_malformed_list_is_refused(text: str, pattern: str, problem: str) -> None:
    with pytest.raises(BadMutants, match=problem):
        read_mutants(text, pattern)


def test_one_line_changes_and_keeps_its_place() -> None:
    assert mutated(TEXT, mutant("if a < b:", "if a > b:")) == TEXT.replace("<", ">")
    assert mutated(TEXT, mutant("return a")) == TEXT.replace("        return a", "        pass")


@pytest.mark.parametrize(
    ("one", "problem"),
    [
        (mutant("if a == b:"), "'if a == b:' 0 times"),
        (mutant("if a <"), "'if a <' 0 times"),
        (mutant("    return b"), "'    return b' 0 times"),
        (mutant("return b", "return b"), "becomes itself"),
    ],
)
def test_a_mutant_that_does_not_fit_its_file_is_refused(one: Mutant, problem: str) -> None:
    with pytest.raises(BadMutants, match=problem):
        mutated(TEXT, one)


def test_a_line_that_is_there_twice_is_refused() -> None:
    with pytest.raises(BadMutants, match="'return b' 2 times: wanted 1"):
        mutated(TEXT + "    return b\n", mutant("return b"))


@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_a_line_that_several_functions_have_is_changed_in_one(keyword: str) -> None:
    other = TEXT.replace("def least", f"{keyword} most")
    one = replace(mutant("return b"), function="most")
    assert mutated(TEXT + other, one) == TEXT + other.replace("return b", "pass")
    for function in ("", "mos", "neither"):
        with pytest.raises(BadMutants, match="wanted 1"):
            mutated(TEXT + other, replace(one, function=function))


def test_all_stale_mutants_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(TEXT)
    check_list([mutant("return a"), mutant("return b")], tmp_path)
    stale = [mutant("return c"), mutant("return a"), mutant("return d"), mutant("x", path="no.py")]
    with pytest.raises(BadMutants) as caught:
        check_list(stale, tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "'return c'" in lines[0]
    assert "'return d'" in lines[1]
    assert "no.py" in lines[2]


def test_verdicts_and_the_closing_line() -> None:
    plain = mutant("return a")
    equal = Mutant(path="one.py", line="x", becomes="y", tests=(), equivalent="it is the same")
    verdicts = [
        verdict(plain, is_killed=True),
        verdict(plain, is_killed=False),
        verdict(equal, is_killed=False),
        verdict(equal, is_killed=True),
    ]
    assert verdicts == ["killed", "! survived", "equivalent", "! killed, though equivalent"]
    assert closing_line(verdicts, 61.7) == (
        "1 of 4 mutants killed, 1 equivalent, 2 not as they should be, in 62 s"
    )


def test_the_list_fits_the_tree() -> None:
    mutants = read_mutants((ROOT / "tools" / "mutants.toml").read_text())
    check_list(mutants, ROOT)
    missing = {test for one in mutants for test in one.tests if not (ROOT / test).exists()}
    assert not missing
