"""The schema of one argument with what it refers to in the schema of all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from grammars.schema_walk import Targets, copied_parts, referred

_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
"""Names that stand in a pointer as they are."""
_DEFINITIONS = ("$defs", "definitions")


def standing_alone(
    schema: Mapping[str, Any], root: Mapping[str, Any], targets: Targets
) -> dict[str, Any]:
    """Return a schema that takes the same outside of `root`, a part of which it is.

    References into `root`, wherever they point, name copies in its `$defs`; there is nothing else
    in these. Where a reference is an anchor, or a part has an address of its own, all definitions
    of `root` are there, and references as they are. `targets` are those of `root`.
    """
    copied = _Copied(root)
    alone = copied.of(schema)
    definitions: dict[str, Any] = {}
    while copied.waiting:
        name, target = copied.waiting.popitem()
        definitions[name] = copied.of(target)
    if copied.has_anchors or targets.are_ambiguous():
        return {**schema, **{key: root[key] for key in _DEFINITIONS if key in root}}
    return {**alone, "$defs": definitions}


class _Copied:
    """Copies parts of a schema, with references to names of their own."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self.waiting: dict[str, Any] = {}
        """What references name that is not copied yet, by its new name."""
        self.has_anchors = False

    def of(self, part: Any) -> Any:
        """Return a copy of a schema; true and false are their own."""
        if not isinstance(part, Mapping):
            return part
        copied = dict(part)
        for one in copied_parts(copied):
            if isinstance(one.get("$ref"), str):
                one["$ref"] = self._reference(one["$ref"])
        return copied

    def _reference(self, reference: str) -> str:
        if reference not in self._names:
            target = referred(reference, self._root, {})
            if not isinstance(target, Mapping | bool):
                self.has_anchors |= reference.startswith("#") and reference[1:2] != "/"
                return reference
            last = reference.rpartition("/")[2]
            name = last if _PLAIN.fullmatch(last) else "part"
            if name in self._names.values():
                name = f"{name}_{len(self._names)}"
            self._names[reference] = name
            self.waiting[name] = target
        return f"#/$defs/{self._names[reference]}"
