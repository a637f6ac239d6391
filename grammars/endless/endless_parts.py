"""Parts of JSON schemas of which no value has an end, because each holds another one.

A node of a tree that requires a child of its own kind is such a part, and so is a definition that
is nothing but a reference to itself. llguidance follows them: an answer nests until it is cut off,
or stops where nothing can follow. A reference to such a part is replaced by a part without values.
What that means around it llguidance finds: an optional property does not come, one of several
choices is none, and what requires such a value has no values either. Of the schema of a tool that
is not strict the reference is left out, so that anything may stand there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grammars.schema_walk import TYPES, referred, type_of

_COMPOSING = ("allOf", "anyOf", "oneOf")
_ANY = ""
"""A placeholder for all types."""
_SIZES = {
    "object": ("minProperties", "maxProperties"),
    "array": ("minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    "number": ("minimum", "maximum"),
}
"""Keywords that leave no values of a type where the first is larger than the second."""

Values = tuple[Any, str]
"""The values of a schema that have a type; with `_ANY` all of them."""
Choices = Sequence[Values]
"""Values of which some at least must have an end."""

_NO_VALUES: Mapping[str, Any] = {"enum": []}


def end_endless(
    whole: Mapping[str, Any], parts: Sequence[dict[str, Any]], *, is_lenient: bool
) -> None:
    """Replace the references to parts of which no value has an end; with `is_lenient`, drop them.

    `parts` are all parts of `whole`, itself included and each before those in it, which are
    changed. A reference that is neither a pointer nor an anchor of this document counts as one to a
    part that has values. The work grows with the size of the schema and no faster.
    """
    referring = [part for part in parts if isinstance(part.get("$ref"), str)]
    # A part with an address of its own is the document of the references in it.
    if not referring or any("$id" in part for part in parts if part is not whole):
        return
    anchors = {one["$anchor"]: one for one in parts if isinstance(one.get("$anchor"), str)}
    targets = {id(part): referred(part["$ref"], whole, anchors) for part in referring}
    endless = {id(part) for part in parts} - _ending(parts, targets)
    for part in referring:
        if id(targets[id(part)]) in endless:
            del part["$ref"]
            part.update({} if is_lenient else _NO_VALUES)


def _ending(parts: Sequence[Mapping[str, Any]], targets: Mapping[int, Any]) -> set[int]:
    """Return the identities of the parts that have a value with an end.

    Values that need no others come first, then those that need only such ones, and so on.
    """
    known, needs = {id(part) for part in parts}, _Needs(parts, targets)
    num_needed: dict[tuple[int, str], int] = {}
    needed_by: dict[tuple[int, str], list[tuple[int, str, int]]] = defaultdict(list)
    """The values that need some or an alternative to them, each with a number of that need."""
    for part in parts:
        types = _types(part)
        num_needed.update({(id(part), kind): 0 for kind in types})
        for number, (kind, choices) in enumerate(needs.of(part, types)):
            if all(id(one) in known or one is False for one, _ in choices):
                num_needed[id(part), kind] += 1
                for one, its_kind in choices:
                    needed_by[id(one), its_kind].append((id(part), kind, number))
    left = [values for values, count in num_needed.items() if not count]
    ending, met = set[int](), set[tuple[int, str, int]]()
    while left:
        values = left.pop()
        ending.add(values[0])
        for need in needed_by.pop(values, []) + needed_by.pop((values[0], _ANY), []):
            if need not in met:
                met.add(need)
                around = need[:2]
                num_needed[around] -= 1
                if not num_needed[around]:
                    left.append(around)
    return ending


@dataclass(slots=True)
class _Together:
    """The properties that parts define which one value must match together, by name."""

    around: _Together | None = None
    """The properties of the part around a choice, which its value has too."""
    named: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def of(self, name: str) -> Iterator[Any]:
        """Yield the schemas of a property."""
        at: _Together | None = self
        while at is not None:
            yield from at.named.get(name, ())
            at = at.around


class _Needs:
    """What must have values for the parts of a schema to have some."""

    def __init__(self, parts: Sequence[Mapping[str, Any]], targets: Mapping[int, Any]) -> None:
        self._targets = targets
        self._together: dict[int, _Together] = {}
        """What is together with the properties of a part, where there may be others."""
        # Through a reference a part is met without those beside it.
        referred = {id(target) for target in targets.values()}
        for part in parts:
            inner = [(one, key) for key in _COMPOSING for one in _list(part, key)]
            if not inner and id(part) not in self._together:
                continue
            own = self._together.setdefault(id(part), _Together())
            for name, schema in _object(part, "properties").items():
                own.named[name].append(schema)
            for one, key in inner:
                if id(one) not in referred:
                    self._together[id(one)] = own if key == "allOf" else _Together(own)

    def of(self, part: Mapping[str, Any], types: Iterable[str]) -> Iterator[tuple[str, Choices]]:
        """Yield what the values of `part` need that are of one of its types, with that type."""
        for kind in types:
            yield from ((kind, choices) for choices in self._of_type(part, kind))

    def _of_type(self, part: Mapping[str, Any], kind: str) -> Iterator[Choices]:
        if id(part) in self._targets:
            yield [(self._targets[id(part)], kind)]
        for keyword in _COMPOSING:
            if keyword == "allOf":
                yield from ([(one, kind)] for one in _list(part, keyword))
            elif isinstance(part.get(keyword), list):
                yield [(one, kind) for one in part[keyword]]
        if "enum" in part or "const" in part:
            return
        if kind == "object":
            yield from self._required(part)
        elif kind == "array":
            yield from _first_items(part)

    def _required(self, part: Mapping[str, Any]) -> Iterator[Choices]:
        """Yield the properties that an object must have."""
        named, by_pattern = _object(part, "properties"), _object(part, "patternProperties")
        others = [*by_pattern.values(), part.get("additionalProperties", True)]
        together = self._together.get(id(part))
        for name in _list(part, "required"):
            if not isinstance(name, str):
                continue
            if name not in named:
                yield [(one, _ANY) for one in others]
            if together is not None:
                yield from ([(one, _ANY)] for one in together.of(name))
            elif name in named:
                yield [(named[name], _ANY)]
        if _size(part, "minProperties"):
            yield [(one, _ANY) for one in (*named.values(), *others)]


def _types(part: Mapping[str, Any]) -> Collection[str]:
    """Return the types of the values that a part may have by its own keywords."""
    named = part.get("type", TYPES)
    if not isinstance(named, list | tuple):
        named = [named] if isinstance(named, str) else TYPES
    types = {"number" if one == "integer" else one for one in named if isinstance(one, str)}
    if "const" in part:
        types.intersection_update([type_of(part["const"])])
    if isinstance(part.get("enum"), list):
        types.intersection_update(map(type_of, part["enum"]))
    for kind, (least, most) in _SIZES.items():
        sizes = part.get(least), part.get(most)
        if all(type_of(size) == "number" for size in sizes) and part[least] > part[most]:
            types.discard(kind)
    return types


def _first_items(part: Mapping[str, Any]) -> Iterator[Choices]:
    """Yield the items that a list must have."""
    least, first, others = _size(part, "minItems"), part.get("prefixItems"), part.get("items")
    if isinstance(others, list):  # as drafts before 2020 have the first ones
        first, others = others, part.get("additionalItems")
    first = first if isinstance(first, list) else []
    yield from ([(one, _ANY)] for one in first[:least])
    if least > len(first):
        yield [(others, _ANY)]


def _object(part: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    value = part.get(keyword)
    return value if isinstance(value, dict) else {}


def _list(part: Mapping[str, Any], keyword: str) -> list[Any]:
    value = part.get(keyword)
    return value if isinstance(value, list) else []


def _size(part: Mapping[str, Any], keyword: str) -> int:
    value = part.get(keyword)
    return value if isinstance(value, int) else 0
