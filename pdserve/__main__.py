"""`pdserve …` and `python -m pdserve …`, wherever they are started.

Ctrl-C ends them without a trace from their start on, and so does an output that takes no more.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
from pathlib import Path

_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130
_ASCII = codecs.lookup("ascii")


def main() -> int:
    """Run `pdserve.cli.main`; end as it does also where Ctrl-C comes before it catches that."""
    try:
        _end_when_told()
        _take_own_modules()
        open_standard_streams()
        from pdserve.cli import main as run

        try:
            return run()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:  # who reads the output has closed it, as in `pdserve --help | head`
        _print_no_more()
        return _EXIT_FAILED
    except OSError as error:
        if not _is_output_lost():
            raise
        _print_no_more()
        print(f"pdserve: the output cannot be written: {error.strerror}", file=sys.stderr)
        return _EXIT_FAILED


def _end_when_told() -> None:
    """Let SIGTERM end also the first process of a container, until a role handles it.

    The kernel ends no such process by a signal that it does not handle, and loading takes seconds:
    the signal would be lost, and who stops the container would wait for the whole grace period.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


def _take_own_modules() -> None:
    """Find this project before modules of equal names, in the current folder or `PYTHONPATH`."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def open_standard_streams() -> None:
    """Open those that are closed; what is opened later would take their numbers, and be printed to.

    A character that the output cannot show does not end a command. An input in ASCII is read as
    UTF-8, which has the same characters and all others.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper) and codecs.lookup(sys.stdin.encoding) == _ASCII:
        sys.stdin.reconfigure(encoding="utf-8")


def _is_output_lost() -> bool:
    """Return whether standard output takes no more: what it keeps, or else a line."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.write_through:
            sys.stdout.write("\n")  # PYTHONUNBUFFERED
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _print_no_more() -> None:
    """Suppress the write at the end of the process, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
