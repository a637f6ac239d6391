"""The table of settings, made from the dataclasses of `common.settings.config`.

The flag, the `PDSERVE_…` variable, the TOML key, `--help`, the example file and the error messages
are all made from this table.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import get_type_hints

from common.nodes import Role
from common.settings.config import Config
from common.settings.setting import Section, Setting

ROLES = {role.value: role for role in Role}
SECTIONS: dict[str, type[Section]] = {
    name: kind for name, kind in get_type_hints(Config).items() if issubclass(kind, Section)
}

Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting. `kind` says how text becomes its value: a type's name, "bytes" or "seconds"."""

    section: str
    key: str
    kind: str
    default: Value
    declared: Setting

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PDSERVE_" + self.key.upper()


ROLE = Option(
    section="",
    key="role",
    kind="str",
    default="",
    declared=Setting(help="what this process does", one_of=tuple(ROLES)),
)


@cache
def all_options() -> dict[str, Option]:
    """Return every setting by key: the role first, then the sections in order.

    Raises `ValueError` when a section of the configuration declares a setting wrongly.
    """
    options = {ROLE.key: ROLE}
    for section, config_class in SECTIONS.items():
        defaults = config_class()
        for field in dataclasses.fields(config_class):
            if field.name in options:
                raise ValueError(f"the setting {field.name!r} exists in two sections")
            declared: Setting = field.metadata["setting"]
            options[field.name] = Option(
                section=section,
                key=field.name,
                kind=declared.unit or _type_name(field.type),
                default=getattr(defaults, field.name),
                declared=declared,
            )
    return options


def options_of(section: str) -> list[Option]:
    """Return the settings of one section, in the order of its dataclass."""
    return [option for option in all_options().values() if option.section == section]


def _type_name(annotation: object) -> str:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if name not in ("str", "int", "float", "bool"):
        raise ValueError(f"a setting cannot have the type {name!r}")
    return name
