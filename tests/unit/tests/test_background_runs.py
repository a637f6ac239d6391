"""A run of tests that a shell has started in the background is one like any other."""

from __future__ import annotations

import signal

from tests import conftest


def test_what_tests_start_heeds_ctrl_c() -> None:
    """A background job ignores it, which all its processes inherit."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        conftest.heed_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
