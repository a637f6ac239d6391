"""Values as JSON: what is written is read again, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from common.errors import InvalidRequest, Overloaded
from common.ids import Incarnation
from common.kv.tiers import Tier
from common.nodes import NodeLoad, Role
from common.recording.values import ValueReader, as_json

LOAD = NodeLoad(
    free_blocks=3,
    free_seats=0,
    num_running=1,
    num_waiting=0,
    queued_tokens=7,
    new_token_ratio=0.1 + 0.2,
    kv_unreachable=(Incarnation("d", 2),),
)


class Pair(NamedTuple):
    first: object
    second: float = 0.0


@dataclass(frozen=True)
class Flagged:
    is_on: bool = False
    number: int = 0


READER = ValueReader(Flagged, Incarnation, NodeLoad, Overloaded, Pair, Role, Tier)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        1e300,
        2**64 - 1,
        (1, (2.5, None), ()),
        b"\x00\xff",
        frozenset((Incarnation("b", 1), Incarnation("a", 2))),
        Role.MIXED,
        Tier.HOST,
        LOAD,
        Pair(Incarnation("a", 1)),
        Pair((), 1.5),
        Flagged(),
        Flagged(is_on=True, number=3),
    ],
)
def test_what_is_written_is_read_again(value: object) -> None:
    found = READER.read(json.loads(json.dumps(as_json(value))))
    assert found == value
    assert type(found) is type(value)


def test_a_field_of_another_type_is_written_though_it_equals_the_default() -> None:
    value: Any = Flagged(is_on=0)  # type: ignore[arg-type]
    assert as_json(value) == {"is": "Flagged", "is_on": 0}


def test_a_typed_error_has_its_text_and_another_one_its_name_alone() -> None:
    error = READER.read(as_json(Overloaded("no room")))
    assert (type(error), str(error)) == (Overloaded, "no room")
    assert as_json(KeyError("a prompt")) == {"is": "KeyError"}


def test_sets_are_written_in_one_order() -> None:
    names = [Incarnation(f"n{i}", 1) for i in range(20)]
    assert as_json(frozenset(names)) == as_json(frozenset(reversed(names)))


def test_what_cannot_be_recorded_is_refused() -> None:
    with pytest.raises(TypeError, match="object cannot be recorded"):
        as_json((1, object()))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"is": "InvalidRequest", "value": "x"}, "'InvalidRequest' is not known"),
        ({"is": ["Role"]}, "is not known"),
        ({}, "None is not known"),
        ({"is": "Pair", "third": 1}, "Pair: "),
        ({"is": "Role", "value": "king"}, "king"),
    ],
)
def test_other_values_are_refused(found: object, says: str) -> None:
    assert InvalidRequest.code  # known to the package, and not to this reader
    with pytest.raises(ValueError, match=says):
        READER.read(found)
