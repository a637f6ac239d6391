"""How a setting is declared: its help text, its unit, and every value that it may have.

A section of the configuration is a dataclass of settings. What `--help`, the example file and an
error message say about a setting is made from its declaration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Problem:
    """A rule that the configuration breaks: `keys` are the settings it is about, `text` says why.

    The first key is the setting that the text says is wrong.
    """

    keys: tuple[str, ...]
    text: str


class FormRule(NamedTuple):
    """A rule that choices and bounds cannot express; `text` completes "wanted …"."""

    text: str
    fits: Callable[[Any], bool]


SHARE = (0, 1)
POWER_OF_TWO = FormRule("a power of two", lambda number: number > 0 and not number & (number - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is declared about one setting.

    `note` explains special values to the reader of `--help`, which shows `metavar` for a text.
    `unit` is "bytes", "seconds" or empty. A bounded number must be finite. A secret value is never
    shown.
    """

    help: str
    note: str = ""
    metavar: str = "NAME"
    unit: str = ""
    one_of: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    form: FormRule | None = None
    is_secret: bool = False

    def accepts(self, value: Any) -> bool:
        """Return whether a value of the right type obeys every rule."""
        return (
            (not self.one_of or value in self.one_of)
            and (self.at_least is None or self.at_least <= value < math.inf)
            and (self.above is None or self.above < value < math.inf)
            and (self.at_most is None or value <= self.at_most)
            and (self.form is None or self.form.fits(value))
        )

    @property
    def bounds(self) -> str:
        """The form and the bounds in words; empty when there are none."""
        parts = [self.form.text] if self.form else []
        least, above, most = map(self._amount, (self.at_least, self.above, self.at_most))
        if above:
            parts.append(f"above {above}")
        if least and most:
            parts.append(f"{least} to {most}")
        elif least:
            parts.append(f"{least} or more")
        elif most:
            parts.append(f"at most {most}")
        return ", ".join(parts) + (" seconds" if parts and self.unit == "seconds" else "")

    @property
    def wanted(self) -> str:
        """The values that the setting may have, in words."""
        return joined_by_or(self.one_of) or self.bounds

    def state(self, value: object) -> str:
        """Return the start of an error message about `value`, such as "is 'x'"."""
        if self.is_secret:
            return "has a wrong value (not shown)"
        if value == "":
            return "is empty"
        is_size = self.unit == "bytes" and type(value) is int
        return f"is {quoted(value)}" + (" bytes" if is_size else "")

    def _amount(self, bound: float | None) -> str:
        if bound is None:
            return ""
        return size_text(int(bound)) if self.unit == "bytes" else str(bound)


def setting(
    default: Any, help_text: str, *, between: tuple[float, float] | None = None, **declared: Any
) -> Any:
    """Return a dataclass field for one setting; `declared` are the other fields of `Setting`.

    `between` is short for `at_least` and `at_most`.
    """
    if between:
        declared["at_least"], declared["at_most"] = between
    return field(default=default, metadata={"setting": Setting(help=help_text, **declared)})


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the configuration: every field of a subclass is made by `setting`."""

    def problems(self) -> list[Problem]:
        """Return every rule that the section breaks.

        A rule about several settings is left out when one of them breaks a rule of its own.
        """
        wrong = []
        for one in fields(self):
            declared: Setting = one.metadata["setting"]
            value = getattr(self, one.name)
            if not declared.accepts(value):
                text = f"{one.name} {declared.state(value)}: wanted {declared.wanted}"
                wrong.append(Problem((one.name,), text))
        bad_keys = {key for problem in wrong for key in problem.keys}
        return wrong + [p for p in self.joint_problems() if bad_keys.isdisjoint(p.keys)]

    def conflict(self, key: str, wanted: str, *others: str) -> Problem:
        """Return the problem of a setting whose value does not suit the values of `others`."""
        state = self.__dataclass_fields__[key].metadata["setting"].state(getattr(self, key))
        given = " and ".join(f"{other} = {getattr(self, other)}" for other in others)
        return Problem((key, *others), f"{key} {state}: wanted {wanted}, with {given}")

    def joint_problems(self) -> list[Problem]:
        """Return every broken rule about several settings. Any of the values may be wrong."""
        return []


def quoted(raw: object) -> str:
    """Return at most 80 characters of a value as Python writes it, without passwords of URLs."""
    text = without_passwords(repr(raw))
    return text if len(text) <= 80 else text[:76] + "…" + text[-1]


def without_passwords(text: str) -> str:
    """Return `text` with the user and the password of every URL in it hidden."""
    return re.sub(r"://[^/\s]*@", "://***@", text)


def joined_by_or(words: Sequence[str]) -> str:
    """Return "a, b or c"."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def size_text(size_bytes: int) -> str:
    """Return a number of bytes with the largest unit that divides it, such as "512MiB"."""
    for unit, unit_bytes in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)
