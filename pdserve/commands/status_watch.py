"""`pdserve status --watch`: the table again each second, in place where there is a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TextIO

INTERVAL_S = 1.0

_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
# Long lines are cut instead of wrapped: a wrapped line would move the table.
_ENTER = "\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE = "\x1b[?7h\x1b[?25h"


def watch(table: Callable[[], str], out: TextIO, pause: Callable[[float], object]) -> None:
    """Show `table()` every second until Ctrl-C.

    On a terminal each table is written over the one before it: clearing the screen first would
    flicker. Elsewhere tables follow each other with a blank line between.
    """
    is_terminal = out.isatty()
    try:
        if is_terminal:
            out.write(_ENTER)
        while True:
            text = table()
            out.write(_in_place(text) if is_terminal else f"{text}\n")
            out.flush()
            pause(INTERVAL_S)
    except KeyboardInterrupt:
        return
    finally:
        if is_terminal:
            out.write(_LEAVE)
            out.flush()


def _in_place(text: str) -> str:
    """Return the text from the top of the screen on, cut to its height; the rest is cleared."""
    height = shutil.get_terminal_size().lines
    lines = text.splitlines()[: height - 1]
    return _HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW
