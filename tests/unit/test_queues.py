"""Queues that lose their first entry are ordered dictionaries.

A plain dictionary keeps the places of the entries that were taken from its start until it is
rebuilt, and a look at its first entry walks over them: taking half of 100,000 entries one by one
took 1.3 s, and 0.02 s in an `OrderedDict`.
"""

from __future__ import annotations

import re

import pytest

from tests.unit.tree import name_of, python_files

FIRST = re.compile(
    r"""next\(\s*iter\(\s*(?:\w+\.)*(\w+)(?:\.\w+\(\))?\s*\)  # next(iter(self._x)), …_x.values()
        |next\(\s*\(?\w+\ for\ \w+\ in\ (?:\w+\.)*(\w+)\  # next((x for x in self._x if …))
    """,
    re.VERBOSE,
)
# Few entries, none of which leaves from the start again and again.
FEW = frozenset(
    {
        ("router/core/known/block_index.py", "_leaving"),
        ("node/control/output_streams.py", "_streams"),
        ("simulator/faults/node/faulty_node.py", "streams"),
    }
)


def plain_queues(source: str) -> list[str]:
    """Return the plain dictionaries of a module whose first entry is asked for."""
    names = {one or other for one, other in FIRST.findall(source)}
    return sorted(name for name in names if re.search(rf"\b{name}: dict\[", source))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("first = next(iter(self._x))", ["_x"]),
        ("first = next(iter(owner.x_of._x.values()), None)", ["_x"]),
        ("first = next((one for one in self._x if one), None)", ["_x"]),
        ("first = next(iter(self._y))", []),
        ("first, _ = self._x.popitem(last=False)", []),
    ],
)
def test_what_a_plain_queue_is(line: str, found: list[str]) -> None:
    assert plain_queues(f"self._x: dict[int, str] = {{}}\n{line}") == found


def test_queues_are_ordered_dictionaries() -> None:
    sources = {
        name_of(path): path.read_text()
        for path in python_files()
        if not name_of(path).startswith(("tests/", "tools/", "bench/"))
    }
    assert len(sources) > 400
    found = {(name, queue) for name, source in sources.items() for queue in plain_queues(source)}
    assert found == FEW
