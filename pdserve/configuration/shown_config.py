"""The effective configuration as TOML text, for people (`check-config`) and for child processes."""

from __future__ import annotations

import json

from common.settings.config import Config
from common.settings.setting import without_passwords
from pdserve.configuration.config_sources import LoadedConfig
from pdserve.configuration.option_values import shown_value
from pdserve.configuration.options import ROLE, SECTIONS, Option, Value, options_of


def shown_config(loaded: LoadedConfig, *, shows_all: bool) -> str:
    """Return the settings that differ from their defaults, or all, with their origins as comments.

    Secrets and passwords are not shown.
    """
    lines = [_shown_line(ROLE, loaded.config.role.value, loaded)]
    num_hidden = 0
    for section in SECTIONS:
        shown = []
        for option in options_of(section):
            value = getattr(getattr(loaded.config, section), option.key)
            if shows_all or value != option.default:
                shown.append(_shown_line(option, value, loaded))
            else:
                num_hidden += 1
        if shown:
            lines += ["", f"[{section}]", *shown]
    if num_hidden:
        lines += ["", f"# {num_hidden} settings have their defaults: --all prints them too"]
    return "\n".join(lines) + "\n"


def config_file_text(config: Config) -> str:
    """Return a TOML file that reads back as exactly this configuration, secrets included."""
    lines = [f"{ROLE.key} = {_toml(config.role.value)}"]
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        values = getattr(config, section)
        lines += [f"{o.key} = {_toml(getattr(values, o.key))}" for o in options_of(section)]
    return "\n".join(lines) + "\n"


def toml_value(option: Option, value: Value) -> str:
    """Return a value as TOML for people: sizes with a unit, URLs without their passwords."""
    if option.kind == "bytes":
        return _toml(shown_value(option, value))
    return _toml(without_passwords(value) if isinstance(value, str) else value)


def _shown_line(option: Option, value: Value, loaded: LoadedConfig) -> str:
    origin = loaded.origins[option.key]
    if option.declared.is_secret:
        state = "set, not shown" if value else "not set"
        return f"# {option.key} is {state}".ljust(44) + f"  # {origin}"
    return f"{option.key} = {toml_value(option, value)}".ljust(44) + f"  # {origin}"


def _toml(value: Value) -> str:
    # JSON's strings, numbers and booleans are TOML's too, once nothing is escaped as surrogates.
    return json.dumps(value, ensure_ascii=False)
