"""How much of the grid of choices is run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-combination",
        action="store_true",
        help="run every policy × order × mode × method, not only all pairs of them",
    )
