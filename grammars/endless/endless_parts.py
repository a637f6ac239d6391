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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

Choices = Sequence[Any]
"""Schemas of which one at least must have a value."""

_NO_VALUES: Mapping[str, Any] = {"enum": []}


def end_endless(
    whole: Mapping[str, Any], parts: Sequence[dict[str, Any]], *, is_lenient: bool
) -> None:
    """Replace the references to parts of which no value has an end; with `is_lenient`, drop them.

    `parts` are all parts of `whole`, itself included, which are changed. A reference that is
    neither a pointer nor an anchor of this document counts as one to a part that has values. The
    work grows with the size of the schema and no faster.
    """
    referring = [part for part in parts if isinstance(part.get("$ref"), str)]
    # A part with an address of its own is the document of the references in it.
    if not referring or any("$id" in part for part in parts if part is not whole):
        return
    anchors = {one["$anchor"]: one for one in parts if isinstance(one.get("$anchor"), str)}
    targets = {id(part): _referred(part["$ref"], whole, anchors) for part in referring}
    endless = {id(part) for part in parts} - _ending(parts, targets)
    for part in referring:
        if id(targets[id(part)]) in endless:
            del part["$ref"]
            part.update({} if is_lenient else _NO_VALUES)


def _ending(parts: Sequence[Mapping[str, Any]], targets: Mapping[int, Any]) -> set[int]:
    """Return the identities of the parts that have a value with an end.

    Those that need no other part come first, then those that need only such ones, and so on.
    """
    known = {id(part) for part in parts}
    num_needed: dict[int, int] = defaultdict(int)
    needed_by: dict[int, list[tuple[int, int]]] = defaultdict(list)
    """The parts that need one or an alternative to it, each with a number of that need, by it."""
    for part in parts:
        for number, choices in enumerate(_needs(part, targets)):
            if all(id(one) in known or one is False for one in choices):
                num_needed[id(part)] += 1
                for one in choices:
                    needed_by[id(one)].append((id(part), number))
    left = [one for one in known if not num_needed[one]]
    ending, met = set(left), set[tuple[int, int]]()
    while left:
        for need in needed_by[left.pop()]:
            if need in met:
                continue
            met.add(need)
            around = need[0]
            num_needed[around] -= 1
            if not num_needed[around]:
                ending.add(around)
                left.append(around)
    return ending


def _needs(part: Mapping[str, Any], targets: Mapping[int, Any]) -> Iterator[Choices]:
    """Yield what must have values for `part` to have one."""
    if id(part) in targets:
        yield [targets[id(part)]]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(choices := part.get(keyword), list):
            yield choices
    if isinstance(together := part.get("allOf"), list):
        yield from ([one] for one in together)
    if "enum" in part or "const" in part:
        return
    if part.get("type") in ("object", ["object"]):
        yield from _required(part)
    elif part.get("type") in ("array", ["array"]):
        yield from _first_items(part)


def _required(part: Mapping[str, Any]) -> Iterator[Choices]:
    """Yield the properties that an object must have."""
    named, by_pattern = _object(part, "properties"), _object(part, "patternProperties")
    others = part.get("additionalProperties", True)
    required = part.get("required")
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str):
            yield [named[name]] if name in named else [*by_pattern.values(), others]
    if _size(part, "minProperties"):
        yield [*named.values(), *by_pattern.values(), others]


def _first_items(part: Mapping[str, Any]) -> Iterator[Choices]:
    """Yield the items that a list must have."""
    least, first, others = _size(part, "minItems"), part.get("prefixItems"), part.get("items")
    if isinstance(others, list):  # as drafts before 2020 have the first ones
        first, others = others, part.get("additionalItems")
    first = first if isinstance(first, list) else []
    yield from ([one] for one in first[:least])
    if least > len(first):
        yield [others]


def _object(part: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    value = part.get(keyword)
    return value if isinstance(value, dict) else {}


def _size(part: Mapping[str, Any], keyword: str) -> int:
    value = part.get(keyword)
    return value if isinstance(value, int) else 0


def _referred(reference: str, whole: Mapping[str, Any], anchors: Mapping[str, Any]) -> Any:
    """Return what a reference names; None where that is not known."""
    own = whole.get("$id")
    if isinstance(own, str):
        reference = reference.removeprefix(own.rstrip("#"))
    if reference and not reference.startswith("#"):
        return None
    fragment = unquote(reference[1:])
    if fragment and not fragment.startswith("/"):
        return anchors.get(fragment)
    found: Any = whole
    for step in fragment.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
