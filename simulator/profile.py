"""A device with a model on it, as the simulator needs it: made from a profile.

`profiles/` has files that come with the simulator, in the format of `pdserve profile`
(`common/measured_profile.py`). Each says in `source` where its numbers are from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.errors import ConfigError
from common.kv.kv_layout import KVLayout
from common.measured_profile import MeasuredProfile, read_measured_profile
from engine.core.runner_contract import StepCosts
from engine.core.step.step_batch import StepBatch
from simulator.profiles.beside_steps import NOTHING_BESIDE, BesideSteps
from simulator.profiles.measured_steps import PUSHED_PARTS, MeasuredSteps, transfer_line

FOLDER = Path(__file__).parent / "profiles"
VOCAB_SIZE = 1 << 31
_NUM_PLANES, _NUMBER_BYTES = 2, 2
_ROWS = (1, 64, 512, 8192)
BETWEEN_MACHINES = ("rdma", "zmq")
"""Transports that lead to another machine, the better one first."""


class StepTimes(Protocol):
    """How long steps take."""

    @property
    def pairs_per_token(self) -> int:
        """Pairs of attention that cost as much as the products of one token; 0: none do."""

    def step_s(self, batch: StepBatch, num_copied_blocks: int = 0) -> float:
        """Return the seconds of a step that runs `batch` and copies blocks from or to the host."""

    def ends_of_decodes(
        self, began_s: float, count: int, context: int, num_steps: int
    ) -> list[float]:
        """Return the end of each of `num_steps` steps of `count` decodes, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One engine node. Bytes and seconds; `network_bytes_per_s` is the speed of its port.

    `kv_memory_bytes` hold KV blocks, beside the weights and the buffers of a step.
    """

    model: str
    device: str
    source: str
    step: StepTimes
    kv_bytes_per_token: int
    kv_memory_bytes: int
    max_model_len: int
    network_bytes_per_s: float
    network_latency_s: float
    beside: BesideSteps = NOTHING_BESIDE

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
    """The facts of a model that a scheduler requires (`SchedulableModel`)."""

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
    """Return the facts of the model on this device, with blocks of `block_size` tokens."""
    cost, num_blocks = profile.step, profile.num_blocks(block_size)
    return ModelledFacts(
        layout=profile.layout(block_size),
        num_blocks=num_blocks,
        max_model_len=min(profile.max_model_len, (num_blocks - 1) * block_size),
        pairs_per_token=cost.pairs_per_token,
        step_costs=StepCosts(
            _ROWS, tuple(cost.ends_of_decodes(0.0, rows, 0, 1)[0] for rows in _ROWS)
        ),
    )


def profile_names() -> list[str]:
    """Return the names of the profiles that come with the simulator."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_profile(path: Path, *, model: str = "", transport: str = "") -> DeviceProfile:
    """Read a profile for `model` (empty: any); KV travels over `transport` (empty: the best one
    that leads to another machine).

    Raises `ConfigError`, which names the file and what is wrong in it.
    """
    measured = read_measured_profile(path, model=model)
    try:
        return device_of(measured, transport)
    except ValueError as error:
        raise ConfigError(f"profile {path}: {error}") from error


def device_of(measured: MeasuredProfile, transport: str = "") -> DeviceProfile:
    """Return a measured profile as a device. Raises `ValueError` for one that cannot serve."""
    model, machine = measured.model, measured.machine
    sizes = (model.kv_bytes_per_token, model.block_size, model.max_model_len, machine.num_blocks)
    if not all(sizes):
        raise ValueError(
            "the model and the machine have a size of 0: wanted kv_bytes_per_token, block_size, "
            "max_model_len and num_blocks above 0"
        )
    lanes = {one.transport for one in measured.transfers}
    if not transport:
        transport = next((one for one in BETWEEN_MACHINES if one in lanes), BETWEEN_MACHINES[-1])
    bytes_per_s, latency_s = transfer_line(measured, transport)
    block_bytes = model.kv_bytes_per_token * model.block_size
    quickest = max(transfer_line(measured, lane)[0] for lane in lanes)
    step = MeasuredSteps(measured, block_copy_s=block_bytes / quickest)
    return DeviceProfile(
        model=model.name,
        device=machine.device or machine.processor,
        source=measured.source,
        step=step,
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_memory_bytes=machine.num_blocks * block_bytes,
        max_model_len=model.max_model_len,
        network_bytes_per_s=bytes_per_s,
        network_latency_s=max(0.0, latency_s + step.beside.handoff_s),
        beside=step.beside,
    )
