"""Every node here waits for a greeting: where the machine stalls, none comes too late."""

from __future__ import annotations

import pytest

from node.control import control_service


@pytest.fixture(autouse=True)
def _patient_with_greetings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_service, "GREETING_TIMEOUT_S", 600.0)
