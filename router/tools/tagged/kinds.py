"""What kinds of values the schema of an argument takes, and which texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grammars.schema_walk import TYPES, Targets, type_of
from router.tools.tagged.tags import SCALARS, scalar_patterns

_MAX_CHOICES = 256
_MAX_DEPTH = 8
_MAX_TOGETHER = 16
_CHOICES = ("anyOf", "oneOf")
_OF_TEXTS = ("enum", "const", "pattern", "minLength", "maxLength", "format")


@dataclass(frozen=True, slots=True)
class Taken:
    """What a schema takes: values of `kinds`, of `TYPES`, texts of one of the schemas `texts`, and
    the scalars whose JSON has one of the patterns `scalars`."""

    kinds: frozenset[str]
    texts: tuple[Mapping[str, Any], ...]
    scalars: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ArgumentKinds:
    """The kinds of values that the arguments of a function have, by name, and of any others."""

    named: Mapping[str, frozenset[str]] = field(default_factory=dict)
    others: frozenset[str] = TYPES

    def of(self, name: str) -> frozenset[str]:
        """Return the kinds of the argument `name`."""
        return self.named.get(name, self.others)


def taken_by(schema: Any, targets: Targets) -> Taken:
    """Return what a part of the schema that `targets` reads takes; where that is not known, more.

    Where the choices of a schema have many choices of their own, anything may be taken.
    """
    kinds: set[str] = set()
    texts: dict[str, Mapping[str, Any]] = {}
    scalars: dict[str, None] = {}
    for choice in _choices_of(schema, targets):
        of_choice, has_fractions = _kinds_of(choice, targets)
        kinds |= of_choice
        listed = _listed(choice)
        if listed is None:
            scalars |= dict.fromkeys(scalar_patterns(of_choice, has_fractions=has_fractions))
        elif of_choice & SCALARS:
            own = [one for one in listed if type_of(one) in of_choice & SCALARS]
            scalars |= dict.fromkeys(re.escape(json.dumps(one)) for one in own)
        if "string" in of_choice:
            text = {key: choice[key] for key in _OF_TEXTS if key in choice}
            texts.setdefault(repr(text), text)
    return Taken(frozenset(kinds), tuple(texts.values()), tuple(scalars))


def _choices_of(schema: Any, targets: Targets) -> list[Mapping[str, Any]]:
    choices = _Choices(targets)
    found = list(choices.of(schema, 0))
    return found if choices.num_left > 0 else [{}]


def _all_kinds(schema: Any, targets: Targets) -> frozenset[str]:
    """Return the kinds of `taken_by`, without what many references to long lists would repeat."""
    found = _choices_of(schema, targets)
    return frozenset(kind for choice in found for kind in _kinds_of(choice, targets)[0])


class _Choices:
    """Finds the choices of one schema, in a bounded number of steps."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self.num_left = _MAX_CHOICES

    def of(self, schema: Any, depth: int) -> Iterator[Mapping[str, Any]]:
        """Yield schemas without choices that take together what `schema` takes, or more."""
        self.num_left -= 1
        if self.num_left <= 0:
            return
        whole = _whole(schema, self._targets)
        if whole is None or depth > _MAX_DEPTH:
            yield {}
            return
        keyword = next((one for one in _CHOICES if isinstance(whole.get(one), list)), None)
        if keyword is None:
            yield whole
            return
        own = {key: value for key, value in whole.items() if key != keyword}
        own_kinds, _ = _kinds_of(own, self._targets)
        for one in whole[keyword]:
            for choice in self.of(one, depth + 1):
                if left := _in_both(own, own_kinds, choice, self._targets):
                    yield left


def _whole(schema: Any, targets: Targets) -> Mapping[str, Any] | None:
    """Return a schema with what it refers to, by itself or in a list of one; None: unknown."""
    for keyword in ("$ref", "allOf", "$ref"):
        if not isinstance(schema, Mapping):
            return {} if schema is True else None
        beside = {key: value for key, value in schema.items() if key != keyword}
        if keyword == "$ref" and keyword in schema:
            found = targets.of(schema)
            schema = {**found, **beside} if isinstance(found, Mapping) else None
        elif keyword == "allOf" and isinstance(schema.get(keyword), list):
            inner = [one for one in schema[keyword] if isinstance(one, Mapping)]
            schema = {**inner[0], **beside} if len(inner) == 1 else beside
            if 1 < len(inner) <= _MAX_TOGETHER:
                schema = _all(inner, beside, targets)
    return schema if isinstance(schema, Mapping) else None


def _all(
    parts: Sequence[Mapping[str, Any]], beside: Mapping[str, Any], targets: Targets
) -> Mapping[str, Any]:
    """Return a schema that takes what several take together, or more: their choices are left out,
    and of keywords that several have all but the last."""
    found = [one for one in map(targets.of, parts) if isinstance(one, Mapping)]
    plain = [
        {key: value for key, value in one.items() if key not in ("allOf", *_CHOICES)}
        for one in (*found, beside)
    ]
    kinds, fractions = zip(*(_kinds_of(one, targets) for one in plain), strict=True)
    merged = {key: value for one in plain for key, value in one.items()}
    types = frozenset(TYPES).intersection(*kinds)
    if not all(fractions) and "number" in types:
        types = types - {"number"} | {"integer"}
    choices = {key: value for key, value in beside.items() if key in _CHOICES}
    return {**merged, **choices, "type": sorted(types)}


def _in_both(
    own: Mapping[str, Any],
    own_kinds: frozenset[str],
    choice: Mapping[str, Any],
    targets: Targets,
) -> Mapping[str, Any] | None:
    """Return the schema of what `own` and one of its choices take; None: nothing."""
    kinds, _ = _kinds_of(choice, targets)
    if not kinds & own_kinds:
        return None
    both = {**own, **choice}
    if "enum" not in both and "const" not in both and own_kinds < kinds:
        both["type"] = own["type"] if "type" in own else sorted(own_kinds)
    return both


def _kinds_of(schema: Mapping[str, Any], targets: Targets) -> tuple[frozenset[str], bool]:
    """Return the kinds of values of a schema without choices, and whether it takes fractions."""
    kind = schema.get("type")
    named = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    has_fractions = not named or "number" in named
    kinds = {"number" if one == "integer" else one for one in named} & TYPES or set(TYPES)
    if "const" in schema:
        kinds &= {type_of(schema["const"])}
    elif isinstance(schema.get("enum"), list):
        kinds &= targets.types_in(schema["enum"])
    return frozenset(kinds), has_fractions and "number" in kinds


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists; None: it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def argument_kinds(parameters: Mapping[str, Any]) -> ArgumentKinds:
    """Return the kinds of the arguments that a tool's schema describes."""
    described, targets = described_arguments(parameters), Targets(parameters)
    named = {name: _all_kinds(one, targets) for name, one in described.named.items()}
    others = _all_kinds(described.others, targets)
    return ArgumentKinds(named, others)


@dataclass(frozen=True, slots=True)
class DescribedArguments:
    """The schemas of a tool's arguments by name, which of them are required, and the schema of any
    others; False: there are none. `not_read` are keywords that have no effect."""

    named: Mapping[str, Any]
    required: frozenset[str]
    others: Any
    not_read: tuple[str, ...]


_ABOUT_VALUES = frozenset(
    ("allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames", "minProperties",
     "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "enum", "const",
     "unevaluatedProperties")
)  # fmt: skip


def described_arguments(parameters: Mapping[str, Any]) -> DescribedArguments:
    """Return what a tool's schema says of its arguments, as far as it names them."""
    found = Targets(parameters).of(parameters)
    top = {**found, **parameters} if isinstance(found, Mapping) else parameters
    named = top.get("properties")
    named = dict(named) if isinstance(named, Mapping) else {}
    others = top.get("additionalProperties", True)
    if "patternProperties" in top:
        others = True
    listed = top.get("required")
    required = [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []
    for name in required:
        named.setdefault(name, others)
    return DescribedArguments(
        named, frozenset(required), others, tuple(key for key in top if key in _ABOUT_VALUES)
    )
