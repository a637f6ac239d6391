"""Every policy, order, mode and method that there is, read from the code that has them."""

from __future__ import annotations

from common.kv.token_budget import DEFAULT_NUM_SPECULATIVE_TOKENS
from common.settings.config import SchedulingConfig
from engine.core.policies.reservation import RESERVATION_POLICIES
from engine.core.policies.victims import VICTIM_ORDERS


def _declared(key: str) -> tuple[str, ...]:
    """Return the choices of a setting."""
    choices: tuple[str, ...] = SchedulingConfig.__dataclass_fields__[key].metadata["setting"].one_of
    assert len(choices) > 1, key
    return choices


RESERVATIONS = tuple(RESERVATION_POLICIES)
ORDERS = tuple(VICTIM_ORDERS)
MODES = _declared("preemption_mode")
REQUEUES = _declared("requeue")
METHODS = tuple(DEFAULT_NUM_SPECULATIVE_TOKENS)
FREE_METHODS = tuple(method for method in METHODS if method != "grammar")
"""Those that draft for answers without a grammar, and none."""
