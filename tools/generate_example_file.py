"""Write `pdserve.example.toml` from the declared settings, or check that it is current.

Usage: python tools/generate_example_file.py [--check]
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from pdserve.configuration.help_text import described
from pdserve.configuration.options import ROLE, SECTIONS, Option, options_of
from pdserve.configuration.shown_config import toml_value

EXAMPLE = Path(__file__).resolve().parent.parent / "pdserve.example.toml"
_INTRODUCTION = """\
# Every setting with its default. Uncomment what you change, and run
#   pdserve check-config --config pdserve.toml
# to see what would be used, and where each value comes from. A flag (--max-num-seqs 8) wins over a
# variable (PDSERVE_MAX_NUM_SEQS=8), a variable over this file, this file over the default.
"""


def example_text() -> str:
    """Return the whole file: every setting as a comment, below what it means."""
    lines = [_INTRODUCTION, *_lines(ROLE, '"mixed"')]
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        for option in options_of(section):
            lines += _lines(option, toml_value(option, option.default))
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the file, or with `--check` return 1 when it is not current."""
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    if not sys.argv[1:]:
        EXAMPLE.write_text(example_text())
    elif EXAMPLE.read_text() != example_text():
        print(f"{EXAMPLE.name} is not what the code declares: run `make docs`", file=sys.stderr)
        return 1
    return 0


def _lines(option: Option, value: str) -> list[str]:
    text = textwrap.fill(described(option), 100, initial_indent="# ", subsequent_indent="# ")
    return [text, f"# {option.key} = {value}"]


if __name__ == "__main__":
    sys.exit(main())
