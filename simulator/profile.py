"""A device with a model on it: what steps cost, what fits, how fast KV travels. Read from JSON.

`profiles/` has the files that come with the simulator. Each says in `source` where its numbers are
from: measured on such a device, or worked out from published figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.kv.kv_layout import KVLayout
from engine.core.runner_contract import StepCosts
from simulator.step_cost import StepCost

FOLDER = Path(__file__).parent / "profiles"
PUSHED_PARTS = 4
"""Layers of the modelled cache. A prefill node sends each when it is computed; a quarter of a real
model's layers leaves at once here, which saves most of the events and delays a handoff by at most
the time of a quarter of its last step."""
VOCAB_SIZE = 1 << 31
_NUM_PLANES, _NUMBER_BYTES = 2, 2
_ROWS = (1, 64, 512, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One engine node. Bytes and seconds; `network_bytes_per_s` is the speed of its port.

    `kv_memory_bytes` hold KV blocks, beside the weights and what a step needs.
    """

    model: str
    device: str
    source: str
    step: StepCost
    kv_bytes_per_token: int
    kv_memory_bytes: int
    max_model_len: int
    network_bytes_per_s: float
    network_latency_s: float

    def layout(self, block_size: int) -> KVLayout:
        """Return the layout of its cache, in `PUSHED_PARTS` layers."""
        of_layer = PUSHED_PARTS * _NUM_PLANES * _NUMBER_BYTES
        return KVLayout(
            model_digest=self.model,
            num_layers=PUSHED_PARTS,
            num_kv_heads=1,
            head_dim=-(-self.kv_bytes_per_token // of_layer),
            block_size=block_size,
            dtype="bfloat16",
        )

    def num_blocks(self, block_size: int) -> int:
        """Return how many blocks fit."""
        return self.kv_memory_bytes // (self.kv_bytes_per_token * block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledFacts:
    """What a scheduler wants to know of its model (`SchedulableModel`)."""

    layout: KVLayout
    num_blocks: int
    max_model_len: int
    pairs_per_token: int
    step_costs: StepCosts
    num_host_blocks: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    needs_staging: bool = False
    can_go_on: bool = False


def facts_of(profile: DeviceProfile, block_size: int) -> ModelledFacts:
    """Return the facts of the model on this device, with blocks of so many tokens."""
    cost, num_blocks = profile.step, profile.num_blocks(block_size)
    return ModelledFacts(
        layout=profile.layout(block_size),
        num_blocks=num_blocks,
        max_model_len=min(profile.max_model_len, (num_blocks - 1) * block_size),
        pairs_per_token=cost.pairs_per_token,
        step_costs=StepCosts(_ROWS, tuple(cost.seconds(rows, 0) for rows in _ROWS)),
    )


def read_profile(path: Path) -> DeviceProfile:
    """Read a profile. Raises `ConfigError`, which names the file and what is wrong in it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"profile {path}: wanted a JSON object")
    try:
        step = StepCost(**_checked(StepCost, found.pop("step", {})))
        return DeviceProfile(step=step, **_checked(DeviceProfile, found, but=("step",)))
    except ValueError as error:
        raise ConfigError(f"profile {path}: {error}") from error


def _checked(kind: type[Any], found: object, but: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """Return the fields of `kind`, all of them and no others; `ValueError` says what is wrong."""
    kinds = {one.name: one.type for one in fields(kind) if one.name not in but}
    if not isinstance(found, dict) or found.keys() != kinds.keys():
        raise ValueError(f"wanted an object with {', '.join(sorted(kinds))}")
    for name, value in found.items():
        if kinds[name] == "str":
            is_good, wanted = isinstance(value, str), "a text"
        else:
            is_good = type(value) in (int, float) and 0 <= value < 1e18
            is_good &= kinds[name] != "int" or (type(value) is int and value > 0)
            wanted = "a number above 0" if kinds[name] == "int" else "a number, 0 or more"
        if not is_good:
            raise ValueError(f"{name} is {value!r}: wanted {wanted}")
    return found
