"""The flags of `pdserve plan` that are no settings of nodes. `planning/wanted.py` checks them."""

from __future__ import annotations

from typing import Any

PLAN_FLAGS = {
    "load": (
        ("--trace", "FILE", "requests of an Azure CSV, a Mooncake JSONL, or a router's JSON log"),
        ("--rate", "R", "instead of a trace: requests per second, at random times"),
        (
            "--lengths",
            "PROMPT:OUTPUT",
            "with --rate: lengths in tokens, as numbers (1000:200), ranges (500-1500:100-300) or "
            "medians with the sigma of a lognormal (1000~0.8:200~0.5)",
        ),
        (
            "--model",
            "NAME",
            "which model to plan for, where a log has several; the profile must be of it",
        ),
    ),
    "targets": (
        ("--ttft", "MS", "time to the first token, in milliseconds"),
        ("--tpot", "MS", "time per token after the first, in milliseconds"),
        ("--attain", "SHARE", "share of the requests that must meet both targets (default: 0.9)"),
    ),
    "plan": (
        (
            "--profile",
            "NAME",
            "a file of `pdserve profile`, or 8b_h100, 8b_h200, 70b_h100 or 70b_h200, which are "
            "made of published figures (default: 8b_h100)",
        ),
        ("--nodes", "N", "plan for exactly N nodes (default: the fewest that meet the targets)"),
        (
            "--at-once",
            "N",
            "all nodes share one machine, whose cores run N of them at full speed at once "
            "(default: each node has the cores of its profile)",
        ),
        (
            "--seeds",
            "K",
            "random loads, or parts of the trace, to try; the answer has the interval of results "
            "(default: 3)",
        ),
        (
            "--requests",
            "N",
            "requests of one trial (default: those of a minute, 250 to 4000)",
        ),
        ("--json", "", "print one JSON object"),
        ("--page", "FILE", "write a page with plots there, as HTML"),
        (
            "--explain",
            "REQUEST",
            "show the course of one request too: its number in the trace, from 1",
        ),
    ),
}
_DEFAULTS = {"attain": "0.9", "profile": "8b_h100", "seeds": "3", "of_model": ""}
_REQUIRED = ("--ttft", "--tpot")
_NAMES = {"--model": "of_model"}
"""`model` itself is a setting: the folder of a node."""


def plan_grammar(flag: str, metavar: str, text: str) -> dict[str, Any]:
    """Return what argparse wants to know of a flag; one without a metavar is on or off."""
    if not metavar:
        return {"action": "store_true", "help": text}
    name = _NAMES.get(flag, flag[2:].replace("-", "_"))
    return {
        "dest": name,
        "metavar": metavar,
        "default": _DEFAULTS.get(name),
        "required": flag in _REQUIRED,
        "help": text,
    }
