"""The table of settings, made from the dataclasses of `common.config`.

One row serves the flag, the `PDSERVE_…` variable, the TOML key, `--help` and the error messages,
so that they cannot disagree.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

from common.config import (
    ApiConfig,
    EngineConfig,
    HandoffConfig,
    ModelConfig,
    PlacementConfig,
    SchedulingConfig,
    SecurityConfig,
    ServerConfig,
    SpeculationConfig,
    TracingConfig,
)

SECTIONS = {
    "server": ServerConfig,
    "model": ModelConfig,
    "engine": EngineConfig,
    "scheduling": SchedulingConfig,
    "speculation": SpeculationConfig,
    "handoff": HandoffConfig,
    "placement": PlacementConfig,
    "api": ApiConfig,
    "security": SecurityConfig,
    "tracing": TracingConfig,
}

_KINDS_BY_UNIT = {"bytes": "bytes", "s": "seconds"}

Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting. `kind` says how text becomes its value: a type's name, bytes or seconds."""

    section: str
    key: str
    kind: str
    default: Value
    help: str
    is_secret: bool

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
    help="what this process does: router, prefill, decode or mixed",
    is_secret=False,
)


@cache
def all_options() -> dict[str, Option]:
    """Every setting by key, the role first, then the sections in order."""
    options = {ROLE.key: ROLE}
    for section, config_class in SECTIONS.items():
        for field in dataclasses.fields(config_class):
            if field.name in options:
                raise ValueError(f"the setting {field.name!r} exists in two sections")
            if field.default is dataclasses.MISSING:
                raise ValueError(f"the setting {field.name!r} has no default")
            options[field.name] = Option(
                section=section,
                key=field.name,
                kind=_KINDS_BY_UNIT.get(field.metadata.get("unit", "")) or _type_name(field.type),
                default=field.default,
                help=field.metadata["help"],
                is_secret=bool(field.metadata.get("secret", False)),
            )
    return options


def options_of(section: str) -> list[Option]:
    """The settings of one section, in the order of its dataclass."""
    return [option for option in all_options().values() if option.section == section]


def _type_name(annotation: object) -> str:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if name not in ("str", "int", "float", "bool"):
        raise ValueError(f"a setting cannot have the type {name!r}")
    return name
