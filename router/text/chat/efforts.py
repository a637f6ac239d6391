"""Efforts of thinking, for templates that take some of them and refuse the others.

Agents ask for an effort with every request, in the words of other models. Which ones a template
takes is found by rendering a small conversation when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest

Variables = Mapping[str, Any]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
"""The efforts that clients ask for, rising."""
_VARIABLE = "reasoning_effort"
_NONE = ("none", "no_think")
"""The words of templates for no thinking."""
_THINKING: Variables = {"enable_thinking": True, "thinking": True}
"""Some templates look at the effort only where the model is to think."""


@dataclass(frozen=True, slots=True)
class Efforts:
    """By effort that a template refuses, the one that it gets instead; None: it gets no effort.

    `without_thinking` is the effort by which alone a template is told not to think.
    """

    instead: Mapping[str, str | None]
    without_thinking: str | None = None

    def fitted(self, variables: Variables) -> Variables:
        """Return variables with an effort that the template takes.

        An effort that it refuses is the next higher one that it takes, else the highest. Without
        thinking it is the template's own word for that, if it has one. Null is no effort.
        """
        effort = variables.get(_VARIABLE)
        others = {name: value for name, value in variables.items() if name != _VARIABLE}
        if effort is None:
            told = self.without_thinking if _is_off(variables) else None
        elif isinstance(effort, str) and effort in self.instead:
            told = self.instead[effort]
        else:
            return variables
        return others if told is None else {**others, _VARIABLE: told}


def _is_off(variables: Variables) -> bool:
    return any(variables.get(name) is False for name in _THINKING)


def efforts_by(render: Callable[[Variables], str]) -> Efforts:
    """Return what a template refuses, which `render` renders, or refuses by `InvalidRequest`."""

    def takes(variables: Variables) -> bool:
        try:
            render({**_THINKING, **variables})
        except InvalidRequest:
            return False
        return True

    known = [one for one in EFFORTS[1:] if takes({_VARIABLE: one})]
    if not known or not takes({}):
        return Efforts({})  # nothing is known of a template that takes no effort
    instead: dict[str, str | None] = {}
    for at, effort in enumerate(EFFORTS[1:], 1):
        if effort not in known:
            instead[effort] = next((one for one in EFFORTS[at:] if one in known), known[-1])
    none = next((one for one in _NONE if takes({_VARIABLE: one})), None)
    if none != "none":
        instead["none"] = none
    return Efforts(instead)
