"""A wire that every test leaves as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rdma.devices import Wire, a_wire


@pytest.fixture
def wire() -> Iterator[Wire]:
    with a_wire() as wire:
        yield wire
