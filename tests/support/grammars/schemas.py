"""JSON schemas for tests of answers that must follow one, whatever a cluster does meanwhile."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from tests.support.cluster.api import Answer, Fields

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Anna", "Ben"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def digits(count: int) -> dict[str, Any]:
    """Return the schema of a list of `count` digits: three tokens each for the tiny model."""
    one = {"type": "integer", "minimum": 0, "maximum": 9}
    return {"type": "array", "items": one, "minItems": count, "maxItems": count}


def asked(schema: dict[str, Any]) -> Fields:
    """Return the fields of a completion that constrain its answer."""
    return {"structured_outputs": {"json": schema}}


def check(answer: Answer, schema: dict[str, Any]) -> None:
    """Fails unless an answer is whole and follows its schema."""
    assert answer.finish_reason == "stop", answer
    jsonschema.validate(json.loads(answer.text), schema)
