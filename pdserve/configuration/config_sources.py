"""Flags, `PDSERVE_…` variables and a TOML file become one frozen `Config`.

A flag wins over a variable, a variable over the file, the file over the default. All problems of
all sources are reported at once, each with the origin of its value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.nodes import Role
from common.settings.config import MOST_DRAIN_S, ApiConfig, Config
from common.settings.setting import Problem, quoted, without_passwords
from pdserve.configuration.config_file import read_config_file, suggestion
from pdserve.configuration.exposure import serve_problems, up_problems
from pdserve.configuration.flags import (
    NO_VALUE,
    PLANNED_KEYS,
    PROFILED_KEYS,
    SET_BY_UP,
    UP_DEFAULTS,
)
from pdserve.configuration.option_values import WANTED, value_from_text, value_from_toml
from pdserve.configuration.options import (
    ROLE,
    ROLES,
    SECTIONS,
    Option,
    Value,
    all_options,
    options_of,
)
from pdserve.configuration.other_words import is_model

# Variables with a meaning outside the configuration.
OTHER_VARIABLES = ("PDSERVE_CACHE", "PDSERVE_CONFIG")

_BY_NAME = re.compile(
    r"PDSERVE_([A-Z0-9_]+_)?"
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_PORT = re.compile(r"PDSERVE_([A-Z0-9_]+_)?PORT")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
_LISTS = ", and commas between several values of one"


class SettingsError(ConfigError):
    """One or more settings are wrong; `problems` has a line for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(without_passwords(problem) for problem in problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration that can start, with the origin of each value by key."""

    config: Config
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The settings of one command: its defaults, those that it chooses itself, and more rules."""

    name: str
    defaults: Mapping[str, Value]
    own_keys: frozenset[str] = frozenset()
    used_keys: frozenset[str] = frozenset()
    """The settings that it has flags for; none named: all but its own."""
    rules: Callable[[Config], list[Problem]] = Config.problems
    """Returns every rule that a configuration breaks under this command."""


SERVE = Command(name="pdserve serve", defaults={}, rules=serve_problems)
PROFILE = Command(name="pdserve profile", defaults={}, used_keys=PROFILED_KEYS)
PLAN = Command(name="pdserve plan", defaults={"model": "demo"}, used_keys=PLANNED_KEYS)
UP = Command(name="pdserve up", defaults=UP_DEFAULTS, own_keys=SET_BY_UP, rules=up_problems)


class _Settings:
    """The values read so far, their origins, and the problems found.

    `is_complete` is false when a source could not be read.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.values: dict[str, Value] = {}
        self.origins: dict[str, str] = {}
        self.problems: list[str] = []
        self.bad_keys: set[str] = set()
        self.is_complete = True

    def put(
        self,
        option: Option,
        raw: object,
        origin: str,
        *,
        read: Callable[[Option, Any], Value] = value_from_text,
    ) -> None:
        """Set the value of one option, in place of one from a source that was read earlier."""
        if option.key in self.command.own_keys:
            self.problems.append(
                f"{option.key} cannot be set: `{self.command.name}` chooses it (from {origin})"
            )
            return
        try:
            if raw is NO_VALUE:
                raise ValueError(f"wanted {WANTED[option.kind]}")
            value = read(option, raw)
        except ValueError as error:
            self.bad_keys.add(option.key)
            state = "has no value" if raw is NO_VALUE else option.declared.state(raw)
            self.problems.append(f"{option.key} {state}: {error} (from {origin})")
        else:
            self.values[option.key] = value
            self.origins[option.key] = origin


def load_config(
    flags: Mapping[str, Any],
    unknown_arguments: list[str],
    environ: Mapping[str, str],
    *,
    command: Command = SERVE,
    role: Role | None = None,
    other_flags: Sequence[str] = (),
) -> LoadedConfig:
    """Read every source. A command without a `--role` flag passes its `role`.

    `flags` maps keys (and `config`) to raw text, booleans or `NO_VALUE`; `unknown_arguments`
    are those that the parser did not recognize, and `other_flags` those of the command that are no
    settings. Raises `SettingsError` with every problem found.
    """
    settings = _Settings(command)
    _read_file(settings, flags, environ)
    _read_variables(settings, environ)
    _read_flags(settings, flags, unknown_arguments, other_flags)
    config = _build(settings, role)
    settings.problems += _rule_problems(settings, config)
    if settings.problems:
        raise SettingsError(settings.problems)
    origins = {
        key: settings.origins.get(key, _default_origin(command, key)) for key in all_options()
    }
    return LoadedConfig(config, origins)


def _read_file(settings: _Settings, flags: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    path = flags.get("config", environ.get("PDSERVE_CONFIG", ""))
    if path is NO_VALUE or (path == "" and "config" in flags):
        settings.problems.append("--config has no value: wanted the path of a TOML file")
        settings.is_complete = False
    if path is NO_VALUE or path == "":
        return
    try:
        entries, problems = read_config_file(Path(path))
    except ConfigError as error:
        settings.problems.append(str(error))
        settings.is_complete = False
        return
    settings.problems += problems
    for entry in entries:
        settings.put(entry.option, entry.raw, entry.origin, read=value_from_toml)


def _read_variables(settings: _Settings, environ: Mapping[str, str]) -> None:
    known = {option.variable: option for option in all_options().values()}
    for name in sorted(environ):
        if not name.startswith("PDSERVE_") or name in OTHER_VARIABLES:
            continue
        if is_injected(name, environ[name]):
            continue
        if name in known:
            settings.put(known[name], environ[name], f"variable {name}")
        else:
            hint = suggestion(name, [*known, *OTHER_VARIABLES])
            settings.problems.append(f"unknown variable {name}{hint}")


def _read_flags(
    settings: _Settings,
    flags: Mapping[str, Any],
    unknown_arguments: list[str],
    other_flags: Sequence[str],
) -> None:
    for option in all_options().values():
        if option.key in flags:
            settings.put(option, flags[option.key], f"flag {option.flag}")
    known = {option.flag: option.key for option in all_options().values()}
    command = settings.command
    used = command.used_keys or all_options().keys() - command.own_keys
    offered = [*other_flags, *(flag for flag, key in known.items() if key in used)]
    follows_flag = False
    for argument in unknown_arguments:
        is_flag = argument.startswith("-") and len(argument) > 1
        # The value after an unknown flag is not shown: it may be a misspelt flag's secret.
        flag, _, _ = argument.partition("=")
        if is_flag and known.get(flag) in command.own_keys:
            settings.put(all_options()[known[flag]], argument, f"flag {flag}")
        elif is_flag and flag in known:
            settings.problems.append(
                f"{flag} changes nothing in `{command.name}`: wanted settings of "
                f"`{command.name} --help=all`"
            )
        elif is_flag:
            settings.problems.append(f"unknown flag {flag}{suggestion(flag, offered)}")
        elif not follows_flag:
            hint = f"; {_model_hint(command, argument)}" if is_model(argument) else ""
            settings.problems.append(
                f"unexpected argument {quoted(argument)}: wanted flags only{hint or _LISTS}"
            )
        follows_flag = is_flag and "=" not in argument


def _model_hint(command: Command, model: str) -> str:
    wanted = f"a model is --model {model}"
    return wanted if command is UP else f"{wanted}, and `{UP.name} --model {model}` runs a cluster"


def _build(settings: _Settings, role: Role | None) -> Config:
    named_role = str(settings.values.get(ROLE.key, ""))
    wanted = f"wanted {ROLE.declared.wanted}"
    if role is None and named_role:
        role = ROLES.get(named_role)
        if role is None:
            settings.problems.append(
                f"role {ROLE.declared.state(named_role)}: {wanted}{suggestion(named_role, ROLES)}"
                f" (from {settings.origins[ROLE.key]})"
            )
    elif role is None and settings.is_complete and ROLE.key not in settings.bad_keys:
        settings.problems.append(f"role is missing: {wanted} ({_ways_to_set(ROLE)})")
    chosen = {**settings.command.defaults, **settings.values}
    if role is Role.ROUTER and named_role:  # `up` configures nodes too
        # No other router can continue a request, so its clients get the time that it has.
        timeout_s = chosen.get("request_timeout_s", ApiConfig().request_timeout_s)
        chosen.setdefault("drain_timeout_s", min(timeout_s, MOST_DRAIN_S))
    sections: dict[str, Any] = {}
    for section, config_class in SECTIONS.items():
        keys = {option.key for option in options_of(section)}
        sections[section] = config_class(**{k: v for k, v in chosen.items() if k in keys})
    return Config(role=role or Role.ROUTER, **sections)


def _rule_problems(settings: _Settings, config: Config) -> list[str]:
    """Return the rules that values break, each with the origin of every value that enters it."""
    described = []
    for problem in settings.command.rules(config):
        keys = problem.keys
        if settings.bad_keys.intersection(keys):
            continue  # its wrong value is reported already; here the default stood in for it
        given = [key for key in keys if key in settings.origins]
        if not given and not settings.is_complete:
            continue  # the unreadable source might have set it
        if not given:
            origin = _ways_to_set(all_options()[keys[0]])
        elif len(keys) == 1:
            origin = f"from {settings.origins[keys[0]]}"
        else:
            origin = ", ".join(
                f"{key} from {settings.origins.get(key, _default_origin(settings.command, key))}"
                for key in keys
            )
        described.append(f"{problem.text} ({origin})")
    return described


def _default_origin(command: Command, key: str) -> str:
    return f"default of `{command.name}`" if key in command.defaults else "default"


def _ways_to_set(option: Option) -> str:
    place = f"{option.key} under [{option.section}]" if option.section else option.key
    return f"set it with {option.flag}, {option.variable}, or {place} in the file"


def is_injected(name: str, value: str) -> bool:
    """Return whether Kubernetes made this variable for a Service: such variables are no settings.

    A Service named `pdserve-router` adds to every container of its namespace
    PDSERVE_ROUTER_SERVICE_HOST, PDSERVE_ROUTER_SERVICE_PORT, PDSERVE_ROUTER_SERVICE_PORT_HTTP,
    PDSERVE_ROUTER_PORT=tcp://10.0.0.7:8000, PDSERVE_ROUTER_PORT_8000_TCP, and four variables that
    begin with the last one. A Service named `pdserve` adds PDSERVE_PORT=tcp://10.0.0.7:8000, which
    has the name of a setting.
    """
    if _BY_NAME.fullmatch(name):
        return True
    return _PORT.fullmatch(name) is not None and _ADDRESS.match(value) is not None
