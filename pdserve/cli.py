"""`pdserve`: one command line for every role. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import ConfigError, PdserveError
from common.files.cache_folder import full_path
from common.nodes import Role
from common.settings.setting import without_passwords
from pdserve.configuration.config_sources import (
    PLAN,
    PROFILE,
    SERVE,
    UP,
    Command,
    LoadedConfig,
    SettingsError,
    load_config,
)
from pdserve.configuration.flags import NO_VALUE, build_parser
from pdserve.configuration.option_values import count_from_text
from pdserve.configuration.other_words import flag_hint
from pdserve.configuration.parser import FlagError
from protos.grpc_core import set_up_grpc

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

_MOST_NODES = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong settings."""
    _keep_files_from_others()
    try:
        return _run(arguments)
    except FlagError as error:
        return _wrong_settings([str(error)])
    except SettingsError as error:
        return _wrong_settings(error.problems)
    except ConfigError as error:
        return _wrong_settings([without_passwords(str(error))])
    except PdserveError as error:
        print(f"pdserve: {without_passwords(str(error))}", file=sys.stderr)
        return EXIT_FAILED
    except MemoryError as error:
        from pdserve.roles.process_limits import out_of_memory

        print(f"pdserve: {out_of_memory(error)}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if parsed.command is None and not unknown:
        parser.print_help()
        return EXIT_OK
    if parsed.command in _WITH_SETTINGS:
        return _WITH_SETTINGS[parsed.command](parsed, unknown)
    if unknown:
        flag = unknown[0].partition("=")[0]
        names = (parsed.command, getattr(parsed, "action", None))
        hint = flag_hint(flag, parser.flags_of(*filter(None, names)))
        return _wrong_settings([f"unexpected argument: {flag}{hint}"])
    return _WITHOUT_SETTINGS[parsed.command](parsed)


def _keep_files_from_others() -> None:
    """Create files that no other user can write: the caches hold code and weights."""
    os.umask(os.umask(0o077) | 0o002)


def _serve(parsed: argparse.Namespace, unknown: list[str]) -> int:
    loaded = _load(parsed, unknown, SERVE)
    set_up_grpc(loaded.config.role, loaded.config.server.log_format)
    from pdserve.roles.run_role import run_role

    return run_role(loaded.config)


def _check_config(parsed: argparse.Namespace, unknown: list[str]) -> int:
    from pdserve.configuration.shown_config import shown_config
    from pdserve.roles.start_check import check_start

    loaded = _load(parsed, unknown, SERVE)
    if lacking := check_start(loaded.config):
        print(f"pdserve: {lacking}", file=sys.stderr)
    print(shown_config(loaded, shows_all=parsed.all), end="")
    return EXIT_OK


def _up(parsed: argparse.Namespace, unknown: list[str]) -> int:
    from pdserve.local_cluster.cluster_plan import ClusterSize
    from pdserve.local_cluster.local_cluster import run_local_cluster

    problems: list[str] = []
    counts = {role: _count(parsed, role, problems) for role in ("prefill", "decode", "mixed")}
    log_folder = getattr(parsed, "log_folder", None)
    if log_folder in (NO_VALUE, ""):
        problems.append("--log-folder has no value: wanted the path of a folder")
    try:
        # Every cluster has a node that decodes, and for that role the rules are strictest.
        loaded = _load(parsed, unknown, UP, Role.DECODE)
    except SettingsError as error:
        raise SettingsError([*problems, *error.problems]) from None
    if problems:
        raise SettingsError(problems)
    return run_local_cluster(
        loaded.config,
        ClusterSize.chosen(**counts),
        has_to_exit_after_sample=parsed.exit_after_sample,
        log_folder=None if log_folder is None else full_path(log_folder),
        restarts_nodes=parsed.restart_nodes,
    )


def _profile(parsed: argparse.Namespace, unknown: list[str]) -> int:
    from pdserve.profiling.profile_command import (
        checked_path,
        loaded_runner,
        run_profile,
        served_times,
    )

    path = checked_path(parsed.file)
    loaded = _load(parsed, unknown, PROFILE, Role.MIXED)
    run_profile(loaded.config, path, loaded_runner, served_times)
    return EXIT_OK


def _plan(parsed: argparse.Namespace, unknown: list[str]) -> int:
    # Of its large tables a simulated node uses a few rows. With huge pages, for which numpy asks
    # unless told otherwise before it is loaded, a thousand nodes take 750 MiB instead of 430.
    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    from common.long_lived import exclude_from_collection
    from pdserve.planning.plan_command import run_plan

    config = _load(parsed, unknown, PLAN, Role.DECODE).config
    exclude_from_collection()
    run_plan(parsed, config)
    return EXIT_OK


def _status(parsed: argparse.Namespace) -> int:
    from pdserve.commands.cluster_status import fetch_cluster
    from pdserve.commands.router_key import router_key
    from pdserve.commands.status_table import status_table

    api_key = router_key(vars(parsed), os.environ)

    def table() -> str:
        cluster = fetch_cluster(parsed.url, api_key=api_key)
        return status_table(cluster, is_wide=parsed.wide)

    if parsed.watch:
        return _watch(table)
    print(table(), end="")
    return EXIT_OK


def _watch(table: Callable[[], str]) -> int:
    from pdserve.commands.status_watch import watch

    first = table()  # A wrong address is an error at once; a later restart of the router is not.

    def latest() -> str:
        nonlocal first
        shown, first = first, ""
        try:
            return shown or table()
        except PdserveError as error:
            return f"{error}\n"

    watch(latest, sys.stdout, time.sleep)
    return EXIT_OK


def _chat(parsed: argparse.Namespace) -> int:
    from pdserve.commands.chat_command import run_chat
    from pdserve.commands.router_key import router_key

    api_key = router_key(vars(parsed), os.environ)
    return run_chat(parsed.url, model=parsed.model, api_key=api_key)


def _drain(parsed: argparse.Namespace) -> int:
    from common.observing.clock import MonotonicClock
    from pdserve.commands.drain_command import ask_to_leave, wait_until_gone
    from pdserve.commands.router_key import router_key

    api_key = router_key(vars(parsed), os.environ)
    leaving = ask_to_leave(parsed.url, parsed.node_id, api_key=api_key)
    print(
        f"{leaving.node_id} takes nothing new; what runs has {leaving.timeout_s:g} s to finish",
        flush=True,
    )
    if parsed.wait:
        took_s = wait_until_gone(
            parsed.url, leaving, MonotonicClock(), api_key=api_key, pause=time.sleep
        )
        print(f"{leaving.node_id} is gone after {took_s:.1f} s")
    return EXIT_OK


def _simulate(parsed: argparse.Namespace) -> int:
    from pdserve.simulating.simulate_command import run_simulation, simulation_of

    return EXIT_OK if run_simulation(simulation_of(vars(parsed))) else EXIT_FAILED


def _role(parsed: argparse.Namespace) -> int:
    from pdserve.commands.role_command import give_role
    from pdserve.commands.router_key import router_key

    api_key = router_key(vars(parsed), os.environ)
    print(give_role(parsed.url, parsed.node_id, parsed.role, api_key=api_key))
    return EXIT_OK


def _kv_key(parsed: argparse.Namespace) -> int:
    from kv_transfer.zmq.curve_keys import new_curve_keys, write_curve_keys

    write_curve_keys(Path(parsed.file), new_curve_keys())
    print(f"{parsed.file}: copy it to every prefill and decode node, and start them with --kv-key")
    return EXIT_OK


def _api_keys(parsed: argparse.Namespace) -> int:
    from pdserve.keys.api_keys_command import run_api_keys

    run_api_keys(parsed)
    return EXIT_OK


def _keys(parsed: argparse.Namespace) -> int:
    from pdserve.keys.keys_command import run_keys

    run_keys(parsed)
    return EXIT_OK


_WITH_SETTINGS: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {
    "serve": _serve,
    "up": _up,
    "check-config": _check_config,
    "profile": _profile,
    "plan": _plan,
}
"""Commands whose unknown arguments are settings, or wrong ones."""

_WITHOUT_SETTINGS: dict[str, Callable[[argparse.Namespace], int]] = {
    "status": _status,
    "chat": _chat,
    "drain": _drain,
    "role": _role,
    "simulate": _simulate,
    "keys": _keys,
    "api-keys": _api_keys,
    "kv-key": _kv_key,
}


def _load(
    parsed: argparse.Namespace, unknown: list[str], command: Command, role: Role | None = None
) -> LoadedConfig:
    flags = build_parser().flags_of(parsed.command) if unknown else ()
    return load_config(
        vars(parsed), unknown, os.environ, command=command, role=role, other_flags=flags
    )


def _count(parsed: argparse.Namespace, role: str, problems: list[str]) -> int | None:
    text = getattr(parsed, role, None)
    if text is None:
        return None
    count = None if text is NO_VALUE else count_from_text(text)
    if count is not None and count <= _MOST_NODES:
        return count
    shown = "has no value" if text is NO_VALUE else f"is {text!r}"
    problems.append(f"--{role} {shown}: wanted a number of nodes, 0 to {_MOST_NODES}")
    return None


def _wrong_settings(problems: Sequence[str]) -> int:
    if len(problems) == 1:
        print(f"pdserve: {problems[0]}", file=sys.stderr)
    else:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        print(f"pdserve: {len(problems)} settings are wrong:{lines}", file=sys.stderr)
    return EXIT_USAGE
