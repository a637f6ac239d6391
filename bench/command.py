"""The command line of a benchmark: its flags, and the figures that it prints."""

from __future__ import annotations

import argparse
import json


def flags_of(name: str, text: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m NAME` with `--json`; `text` is the module's docstring."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON line and no indentation")
    return parser


def print_figures(figures: object, *, is_one_line: bool) -> None:
    """Print figures as JSON: on one line, or for people to read."""
    print(json.dumps(figures, indent=None if is_one_line else 2))
