"""`pdserve …` and `python -m pdserve …`, which Ctrl-C ends without a trace from its start on."""

import sys

_EXIT_INTERRUPTED = 130


def main() -> int:
    """Run `pdserve.cli.main`; end as it does also where Ctrl-C comes before it catches that."""
    try:
        from pdserve.cli import main as run

        return run()
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
