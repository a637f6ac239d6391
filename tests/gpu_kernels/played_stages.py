"""Stages without a card, as a program: one that waits, and one that is never reached."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

from tests.gpu import on_card
from tests.gpu.stages.model import Findings


def _open_card() -> Any:
    return SimpleNamespace(device=SimpleNamespace(properties=SimpleNamespace(name="a card")))


def _slow(card: Any, found: Findings) -> None:
    found["slow"] = "begun"
    print("pid", os.getpid(), flush=True)
    time.sleep(60)


if __name__ == "__main__":
    stages = {"slow": _slow, "quick": _slow}
    vars(on_card).update(STAGES=stages, compiled=lambda chosen: {}, Card=_open_card)
    sys.exit(min(on_card.main(), 1))
