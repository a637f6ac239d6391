"""A status that is shown again and again: in place on a terminal, one after the other elsewhere."""

from __future__ import annotations

import io
import os

import pytest

from pdserve.commands.status_watch import INTERVAL_S, watch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Pauses:
    """Ctrl-C comes in the pause behind the last table."""

    def __init__(self, num_tables: int) -> None:
        self.left = num_tables

    def __call__(self, span_s: float) -> None:
        assert span_s == INTERVAL_S
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_tables_follow_each_other_where_there_is_no_terminal() -> None:
    tables = iter(["one\n", "two\n"])
    out = io.StringIO()
    watch(lambda: next(tables), out, Pauses(2))
    assert out.getvalue() == "one\n\ntwo\n\n"


def test_a_terminal_is_written_over_and_never_cleared_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 4)))
    tables = iter(["a\nb\n", "c\n", "1\n2\n3\n4\n5\n"])
    out = Terminal()
    watch(lambda: next(tables), out, Pauses(3))
    clear = "\x1b[2J"
    before, _, shown = out.getvalue().partition(clear)
    assert before == "\x1b[?25l\x1b[?7l", "no cursor, and long lines are cut"
    assert clear not in shown
    assert shown == (
        "\x1b[Ha\x1b[K\nb\x1b[K\n\x1b[J"
        "\x1b[Hc\x1b[K\n\x1b[J"
        "\x1b[H1\x1b[K\n2\x1b[K\n3\x1b[K\n\x1b[J"
        "\x1b[?7h\x1b[?25h"
    )


def test_an_error_leaves_the_terminal_as_it_was() -> None:
    def table() -> str:
        raise ValueError("a bug")

    out = Terminal()
    with pytest.raises(ValueError, match="a bug"):
        watch(table, out, Pauses(1))
    assert out.getvalue().endswith("\x1b[?7h\x1b[?25h")
