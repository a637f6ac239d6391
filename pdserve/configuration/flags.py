"""The flags of every command. It keeps values as raw text; `config_sources` checks them.

argparse would stop at the first error, but all errors are reported at once. So the parser treats
every flag's value as optional, and passes unknown flags on instead of refusing them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Set
from functools import cache
from typing import Any

from common.version import VERSION
from pdserve.configuration.help_text import (
    EXAMPLES,
    INTRODUCTION,
    option_help,
    section_title,
)
from pdserve.configuration.options import ROLE, SECTIONS, Option, all_options, options_of
from pdserve.configuration.parser import Parser
from pdserve.configuration.plan_flags import PLAN_FLAGS, plan_grammar

NO_VALUE = object()
"""The value of a flag that was given without one."""

# `pdserve up` chooses these settings itself.
SET_BY_UP = frozenset(
    {
        "role",
        "advertise_host",
        "kv_port",
        "kv_host",
        "kv_advertise",
        "metrics_port",
        "node_id",
        "redis_url",
        "cluster",
        "keys",
        "kv_key",
        "open_api",
    }
)

UP_MEMORY_FRACTION = 0.3
"""The share of a machine that all nodes of `up` take together by default."""
UP_DEFAULTS: dict[str, str | int | float] = {
    "model": "demo",
    "port": 8000,
    "max_num_batched_tokens": 512,
}
"""Several nodes share one machine here: steps must stay short."""

PROFILED_KEYS = frozenset(
    option.key for section in ("model", "engine", "speculation") for option in options_of(section)
)
"""The settings that change what `profile` measures."""

PLANNED_KEYS = frozenset(
    {
        *("max_num_seqs", "max_num_batched_tokens", "block_size", "enable_prefix_caching"),
        *(option.key for option in options_of("scheduling")),
        *("local_prefill_threshold", "max_queued_requests", "placement_policy", "session_ttl_s"),
    }
    - {"async_scheduling", "preemption_mode", "swap_space"}
)
"""The settings that `plan` simulates."""

EVERYDAY_KEYS = (
    *("model", "served_model_name", "host", "port", "redis_url", "keys", "insecure", "api_key"),
    *("max_model_len", "max_num_seqs", "kv_cache_memory", "memory_fraction", "num_threads"),
    *("speculative_method", "log_level"),
)
"""The settings that the short help shows."""

COMMAND_GROUPS = {
    "run a cluster": ("up", "serve", "check-config"),
    "ask it": ("status", "chat"),
    "change it": ("drain", "role"),
    "protect it": ("keys", "api-keys", "kv-key"),
    "measure, plan and test": ("profile", "plan", "simulate"),
}
"""The commands by what they are for, as the help shows them."""

_METAVARS = {"int": "N", "float": "NUMBER", "bytes": "BYTES", "seconds": "SECONDS"}


@cache
def build_parser() -> Parser:
    """Return the parser of all commands. On errors it raises `FlagError` instead of exiting."""
    parser = Parser(
        prog="pdserve", description=INTRODUCTION, epilog=EXAMPLES["pdserve"], part="COMMAND"
    )
    parser.add_argument("--version", action="version", version=f"pdserve {VERSION}")
    parser.command_groups = COMMAND_GROUPS
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog="pdserve")
    _add_up(commands)
    _add_serve(commands, "serve", "run one role until SIGTERM or Ctrl-C")
    _add_status(commands)
    _add_chat(commands)
    _add_drain(commands)
    _add_role(commands)
    check = _add_serve(commands, "check-config", "check settings as `serve` does, and print them")
    check.add_argument(
        "--all", action="store_true", help="also print the settings that have their defaults"
    )
    _add_profile(commands)
    _add_plan(commands)
    _add_simulate(commands)
    _add_keys(commands)
    _add_api_keys(commands)
    _add_kv_key(commands)
    return parser


def _add_serve(commands: Any, name: str, summary: str) -> Parser:
    command = _add_command(commands, name, summary)
    _add_config_file(command)
    command.add_argument(ROLE.flag, **_grammar(ROLE, {}))
    _add_sections(command, without=frozenset(), defaults={})
    return command


def _add_up(commands: Any) -> None:
    command = _add_command(commands, "up", "run a whole cluster on this machine")
    cluster = command.add_argument_group("cluster")
    for flag, role, default in (
        ("--prefill", "prefill", "1"),
        ("--decode", "decode", "1"),
        ("--mixed", "mixed", "0; with --mixed alone there are no others"),
    ):
        cluster.add_argument(
            flag,
            metavar="N",
            nargs="?",
            const=NO_VALUE,
            default=argparse.SUPPRESS,
            help=f"number of {role} nodes (default: {default})",
        )
    cluster.add_argument(
        "--exit-after-sample",
        action="store_true",
        help="stop everything after the sample answer",
    )
    cluster.add_argument(
        "--restart-nodes",
        action="store_true",
        help="start a node that dies again: 5 tries in a row, after 1, 2, 4, 8 and 16 s",
    )
    cluster.add_argument(
        "--log-folder",
        metavar="DIR",
        nargs="?",
        const=NO_VALUE,
        default=argparse.SUPPRESS,
        help="keep the logs there; an earlier run's are appended to (default: a temporary folder, "
        "which is kept only if something fails)",
    )
    _add_config_file(command)
    _add_sections(command, without=SET_BY_UP, defaults=UP_DEFAULTS)


def _add_status(commands: Any) -> None:
    command = _add_command(commands, "status", "show a running cluster as a table")
    command.add_argument(
        "--watch", action="store_true", help="refresh the table every second until Ctrl-C"
    )
    command.add_argument(
        "--wide", action="store_true", help="also versions, addresses, memory, scheduling, drafts"
    )
    _add_router(command)


def _add_chat(commands: Any) -> None:
    command = _add_command(commands, "chat", "talk to a running cluster")
    command.add_argument(
        "--model",
        metavar="NAME",
        default="",
        help="name of the model to ask (default: the one that is served)",
    )
    _add_router(command)


def _add_drain(commands: Any) -> None:
    command = _add_command(commands, "drain", "let a node finish its requests and exit")
    command.add_argument("node_id", metavar="NODE_ID", help="name of the node in `pdserve status`")
    command.add_argument(
        "--wait", action="store_true", help="wait until the router no longer lists the node"
    )
    _add_router(command)


def _add_role(commands: Any) -> None:
    command = _add_command(commands, "role", "give a running node another role")
    command.add_argument("node_id", metavar="NODE_ID", help="name of the node in `pdserve status`")
    command.add_argument("role", metavar="ROLE", help="prefill, decode or mixed")
    _add_router(command)


def _add_router(command: Parser) -> None:
    """Add the flags that name the router to ask, and the key for it (`commands/router_key.py`)."""
    command.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="the router to ask (default: http://127.0.0.1:8000)",
    )
    command.add_argument(
        "--api-key-file",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="file with the router's API key, if it requires one; only its owner may read it "
        "(default: the variable PDSERVE_API_KEY)",
    )
    command.add_argument(
        "--api-key",
        metavar="KEY",
        default=argparse.SUPPRESS,
        help="the key itself; every user of this machine sees it in the list of processes",
    )


def _add_profile(commands: Any) -> None:
    command = _add_command(commands, "profile", "measure a model on this machine, for planning")
    command.add_argument("file", metavar="FILE", help="where to write what was measured, as JSON")
    _add_config_file(command)
    _add_sections(command, without=all_options().keys() - PROFILED_KEYS, defaults={})


def _add_plan(commands: Any) -> None:
    command = _add_command(commands, "plan", "find how many nodes a load wants, of which role")
    for title, flags in PLAN_FLAGS.items():
        group = command.add_argument_group(title)
        for flag, metavar, text in flags:
            group.add_argument(flag, **plan_grammar(flag, metavar, text))
    _add_config_file(command)
    _add_sections(command, without=all_options().keys() - PLANNED_KEYS, defaults={})


def _add_simulate(commands: Any) -> None:
    summary = "break a simulated cluster in many ways, and check that every answer is right"
    command = _add_command(commands, "simulate", summary)
    for flag, metavar, meaning in (
        ("--seed", "S", "the first history's seed; the next ones follow (default: 0)"),
        ("--histories", "N", "how many histories to run (default: 100)"),
        ("--processes", "N", "in so many processes (default: one for each core)"),
        (
            "--faults",
            "KINDS",
            "crash, freeze, partition, loss, repeat, clock, store, step, hang, role, drain, "
            "upgrade and disk, separated by commas; or all, or none (default: all)",
        ),
        ("--requests", "N", "requests of each history (default: 20)"),
        ("--nodes", "P:D", "prefill and decode nodes (default: drawn for each history)"),
        (
            "--replay",
            "FILE",
            "run the history of a file instead, or replay a recording",
        ),
        (
            "--output",
            "FILE",
            "where to write a wrong history, shortened (default: wrong-history.json)",
        ),
    ):
        command.add_argument(flag, metavar=metavar, default=argparse.SUPPRESS, help=meaning)
    command.add_argument("--json", action="store_true", help="print one JSON object instead")


def _add_kv_key(commands: Any) -> None:
    command = _add_command(commands, "kv-key", "make the key that encrypts KV between nodes")
    command.add_argument("file", metavar="FILE", help="where to write it; must not exist yet")


def _add_api_keys(commands: Any) -> None:
    summary = "add, revoke and list the API keys of a router"
    actions = _add_command(commands, "api-keys", summary).add_subparsers(
        dest="action",
        metavar="COMMAND",
        title="commands",
        prog="pdserve api-keys",
        required=True,
    )
    add = _add_command(actions, "add", "make a key and print it", "api-keys")
    revoke = _add_command(actions, "revoke", "remove a key from the file", "api-keys")
    listing = _add_command(actions, "list", "show the keys of a file, without the keys", "api-keys")
    for command in (add, revoke, listing):
        command.add_argument("file", metavar="FILE", help="the file of keys; `add` makes it")
    for command in (add, revoke):
        command.add_argument("name", metavar="NAME", help="name of the client that uses the key")
    add.add_argument(
        "--admin",
        action="store_true",
        help="the key also drains and moves nodes",
    )
    for flag, what in (
        ("--requests-per-minute", "maximum generation requests per minute"),
        ("--max-concurrent", "maximum generation requests at once"),
    ):
        add.add_argument(
            flag, metavar="N", type=int, default=0, help=f"{what} (default: 0, no limit)"
        )


def _add_keys(commands: Any) -> None:
    summary = "make and renew the keys of a cluster on several machines"
    actions = _add_command(commands, "keys", summary).add_subparsers(
        dest="action", metavar="COMMAND", title="commands", prog="pdserve keys", required=True
    )
    init = _add_command(actions, "init", "make a CA, certificates, keys and passwords", "keys")
    renew = _add_command(actions, "renew", "make one certificate again, with the same CA", "keys")
    for command in (init, renew):
        command.add_argument("folder", metavar="DIR", help="the folder of all keys")
        command.add_argument(
            "--days",
            metavar="N",
            type=int,
            default=365,
            help="how long certificates are valid (default: 365)",
        )
    renew.add_argument("role", metavar="ROLE", help="whose certificate: router, node or redis")


def _add_command(commands: Any, name: str, summary: str, parent: str = "") -> Parser:
    """Add a command and return its parser. Commands of one `parent` share its examples."""
    command: Parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=EXAMPLES[parent or name],
        part="GROUP" if name in ("serve", "up", "check-config", "profile", "plan") else "",
    )
    return command


def _add_config_file(command: Parser) -> None:
    command.add_argument(
        "--config",
        metavar="FILE",
        nargs="?",
        const=NO_VALUE,
        default=argparse.SUPPRESS,
        help="a TOML file with settings (default: the variable PDSERVE_CONFIG)",
    )


def _add_sections(command: Parser, *, without: Set[str], defaults: dict[str, Any]) -> None:
    command.everyday_keys = EVERYDAY_KEYS
    for section in SECTIONS:
        options: Iterable[Option] = options_of(section)
        group = command.add_argument_group(section_title(section))
        for option in options:
            if option.key not in without:
                group.add_argument(option.flag, **_grammar(option, defaults))


def _grammar(option: Option, defaults: dict[str, Any]) -> dict[str, Any]:
    shared = {
        "dest": option.key,
        "default": argparse.SUPPRESS,
        "help": option_help(option, defaults.get(option.key, option.default)),
    }
    if option.kind == "bool":
        return {**shared, "action": argparse.BooleanOptionalAction}
    metavar = _METAVARS.get(option.kind, option.declared.metavar)
    return {**shared, "metavar": metavar, "nargs": "?", "const": NO_VALUE}
