"""Tools whose form for the client differs from the function that the model sees."""

from __future__ import annotations

from typing import NamedTuple

TEXT_ARGUMENT = "input"
"""The one argument of the function that a custom tool becomes."""


class ClientTool(NamedTuple):
    """The name of a function for its client, perhaps in a namespace.

    `is_custom`: the client gets the text of the one argument instead of an object.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False


def function_name(name: str, namespace: str | None) -> str:
    """Return the name of the function that the tool `name` of a namespace becomes."""
    return name if namespace is None else f"{namespace}.{name}"
