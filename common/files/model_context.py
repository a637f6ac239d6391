"""The longest context of a model: routers and nodes read it alike from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_POSITIONS = 1 << 40
"""Far beyond any model: a file with larger numbers is broken, and would take memory."""


def longest_context(config: Mapping[str, Any]) -> int:
    """Return the most tokens of a sequence; `max_position_embeddings` of `config` was checked.

    With YaRN it is at least `factor` times the original context: where users add YaRN to a
    checkpoint, `max_position_embeddings` often stays that of the model before. It is never less
    than `max_position_embeddings`, and values that nodes refuse change nothing.
    """
    positions: int = config["max_position_embeddings"]
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    beside = config
    if isinstance(scaling, Mapping) and "full_attention" in scaling:
        # By the kind of a layer: those with a window limit nothing.
        scaling = beside = scaling["full_attention"]
    if not isinstance(scaling, Mapping):
        return positions
    if (scaling.get("rope_type") or scaling.get("type")) != "yarn":
        return positions
    key = "original_max_position_embeddings"
    original = _possible(beside.get(key) or scaling.get(key))
    factor = _possible(scaling.get("factor"))
    return max(positions, int(original * factor))


def _possible(value: object) -> float:
    """Return a number that YaRN may have, 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return value if 0 < value <= MOST_POSITIONS else 0
