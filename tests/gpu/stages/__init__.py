"""The stages of `on_card`. Each plans itself with a `SpecRecorder` first, then runs on a card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.gpu.stages.bits import bits
from tests.gpu.stages.ceilings import ceilings
from tests.gpu.stages.draws import draws
from tests.gpu.stages.experts import experts, experts_step
from tests.gpu.stages.launch_cost import launch_cost
from tests.gpu.stages.model import Findings
from tests.gpu.stages.products import price, products, sweep
from tests.gpu.stages.quantised import quantised
from tests.gpu.stages.quantised_runner import runner_quantised
from tests.gpu.stages.runner import runner_bits, runner_bytes, runner_steps
from tests.gpu.stages.sharing import ipc, ipc_lane
from tests.gpu.stages.step_forms import step_forms
from tests.gpu.stages.steps import attention, host, prefill, step
from tests.gpu.stages.tile_forms import tile_forms

UNASKED = frozenset(
    {"sweep", "step_forms", "tile_forms", "ipc_lane", "runner_bits", "runner_bytes",
     "runner_steps", "runner_quantised", "experts_step"}
)  # fmt: skip
"""Stages that run only when they are named."""

STAGES: dict[str, Callable[[Any, Findings], None]] = {
    "ceilings": ceilings,
    "bits": bits,
    "products": products,
    "sweep": sweep,
    "quantised": quantised,
    "experts": experts,
    "experts_step": experts_step,
    "attention": attention,
    "step": step,
    "step_forms": step_forms,
    "tile_forms": tile_forms,
    "draws": draws,
    "prefill": prefill,
    "price": price,
    "host": host,
    "launch_cost": launch_cost,
    "ipc": ipc,
    "ipc_lane": ipc_lane,
    "runner_bits": runner_bits,
    "runner_bytes": runner_bytes,
    "runner_steps": runner_steps,
    "runner_quantised": runner_quantised,
}
