"""Mixtures of experts in the shapes of Qwen3-30B-A3B and gpt-oss-20b: bits of a layer, times of its
kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engine.runner.gpu.experts.expert_launches import ExpertLaunches
from engine.runner.gpu.experts.expert_tiles import ExpertTiles, expert_tiles
from engine.runner.gpu.kernels.random_numbers import fill_normal
from engine.runner.gpu.launcher import KernelSpec
from engine.runner.gpu.launches import AttentionShape, Bound, KVPool, Launches
from engine.runner.gpu.steps.step_memory import StepMemory, activation_sizes
from engine.runner.gpu.weights import DecoderWeights, Form, Matrix, random_weights
from engine.runner.weights.spec.expert_mixture import ClampedSwish, ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec
from tests.gpu.stages.ceilings import read_gb_s
from tests.gpu.stages.model import BLOCK, CONTEXT, MAX_LEN, NUM_BLOCKS, QWEN3_8B, Checks, Findings
from tests.gpu.stages.steps import started_step

MOST_ERROR = 6e-3
"""The error of results that are rounded to bfloat16, as what they are of is, beside float64."""
NUM_LAYERS = 48
_FEW_LAYERS = 4
"""Layers whose experts take 4.8 GB, of which no cache holds a part that matters."""
_FORMS = (Form.BF16, Form.FP8, Form.Q4_0, Form.Q8_0)
_ROWS = (1, 8, 64, 4096)
_OTHER_BYTES = 12 << 30
"""What a card holds beside the layers: embedding, head, buffers, and what others take."""


def spec_of(num_layers: int) -> DecoderSpec:
    """Return Qwen3-30B-A3B with so many of its layers."""
    return replace(
        QWEN3_8B, architecture="Qwen3MoeForCausalLM", num_layers=num_layers, hidden_size=2048,
        intermediate_size=6144, num_kv_heads=4,
        experts=ExpertMixture(
            layers=tuple(range(num_layers)), num_experts=128, num_chosen=8, inner_size=768,
            shared_size=0, is_normalised=True, least_sum=0.0, has_choice_bias=False,
        ),
    )  # fmt: skip


def gpt_oss_of(num_layers: int) -> DecoderSpec:
    """Return gpt-oss-20b with so many of its layers."""
    return replace(
        QWEN3_8B, architecture="GptOssForCausalLM", num_layers=num_layers, hidden_size=2880,
        intermediate_size=2880, num_heads=64, head_dim=64, vocab_size=201088,
        has_qkv_bias=True, has_output_bias=True, has_head_norms=False, has_sinks=True,
        windows=tuple(128 * (1 - layer % 2) for layer in range(num_layers)),
        experts=ExpertMixture(
            layers=tuple(range(num_layers)), num_experts=32, num_chosen=4, inner_size=2880,
            shared_size=0, is_normalised=True, least_sum=0.0, has_choice_bias=False,
            has_gate_bias=True, has_biases=True,
            clamped_swish=ClampedSwish(steepness=1.702, limit=7.0),
        ),
    )  # fmt: skip


class _Layers:
    """Layers on a card, with the buffers of steps of `num_rows` rows."""

    def __init__(self, card: Any, spec: DecoderSpec, form: Form, num_rows: int = _ROWS[-1]) -> None:
        self.card, self.spec, self.form = card, spec, form
        num_layers = spec.num_layers
        self.weights: DecoderWeights = random_weights(
            card.device, card.kernel, self.spec, MAX_LEN, 1, card.stream, form
        )
        piece_bytes = 2 * self.spec.num_kv_heads * BLOCK * self.spec.head_dim
        self._blocks = card.device.allocate(2 * num_layers * NUM_BLOCKS * piece_bytes)
        card.device.fill(self._blocks.address, 0, self._blocks.num_bytes, card.stream)
        pool = KVPool(self._blocks.address, NUM_BLOCKS, BLOCK, piece_bytes)
        self.launches = Launches(
            card.kernel, card.device.properties, self.spec, self.weights, pool, AttentionShape()
        )
        sizes = activation_sizes(self.spec, num_rows) | {"positions": 4 * num_rows}
        self.memory = StepMemory(card.device, sizes)
        card.device.fill(self.memory["positions"], 0, sizes["positions"], card.stream)
        types = {"out": "*bf16", "seed": "i64", "scale": "fp32", "count": "i64"}
        self._fill = card.kernel(KernelSpec(fill_normal, types, {"SIZE": 1024}))

    @property
    def mixture(self) -> ExpertMixture:
        assert self.spec.experts is not None
        return self.spec.experts

    def experts(self, tile_rows: int | None = None) -> ExpertLaunches:
        """Return a mixture's launches, with tiles of so many rows or those that are shipped."""

        def choose(rows: int, mixture: ExpertMixture, gate_up: Matrix, down: Matrix) -> ExpertTiles:
            if tile_rows is not None:
                rows, mixture = 1, replace(mixture, num_experts=8, num_chosen=tile_rows)
            return expert_tiles(rows, mixture, gate_up, down)

        return ExpertLaunches(
            self.launches, self.card.device.properties, self.spec, self.mixture, choose
        )

    def layer(self, index: int, num_rows: int, tile_rows: int | None = None) -> list[Bound]:
        """Return the launches of a layer behind its norm: each row is of a position."""
        return self.experts(tile_rows).layer(
            self.weights.layers[index], self.memory, num_rows, self.memory["positions"],
            self.weights.final_norm,
        )  # fmt: skip

    def set_rows(self, num_rows: int) -> None:
        """Set the first rows, whose numbers do not depend on how many there are."""
        count = num_rows * self.spec.hidden_size
        for name, seed in (("hidden", 5), ("normed", 6)):
            launch = self._fill.bind((-(-count // 4096),), self.memory[name], seed, 1.0, count)
            launch(self.card.stream)

    def results(self, num_rows: int, tile_rows: int | None = None) -> np.ndarray:
        """Return rows, float32 [num_rows, hidden_size], behind the first layer's experts."""
        self.set_rows(num_rows)
        for launch in self.layer(0, num_rows, tile_rows):
            launch(self.card.stream)
        size = self.spec.hidden_size
        found: np.ndarray = self.card.floats(self.memory["hidden"], num_rows * size)
        return found.reshape(num_rows, size)

    def integers(self, name: str, count: int) -> np.ndarray:
        self.card.device.synchronize(self.card.stream)
        raw = self.card.device.download(self.memory[name], 4 * count)
        return np.frombuffer(raw, np.int32)

    def close(self) -> None:
        self.card.device.synchronize_all()
        self.memory.close()
        self._blocks.close()
        self.weights.close()


def experts(card: Any, found: Findings) -> None:
    """A layer's bits in every tile and among any number of rows, and the time of each kernel."""
    checks = Checks()
    models = [(spec_of(_FEW_LAYERS), form) for form in _FORMS]
    for spec, form in [*models, (gpt_oss_of(_FEW_LAYERS), Form.MXFP4)]:
        layers = _Layers(card, spec, form)
        try:
            with checks.check(f"experts in {form.name}"):
                _compare(layers, found)
            for num_rows in _ROWS:
                _time(layers, found, num_rows)
        finally:
            if card.is_real:
                layers.close()
    checks.end()


def _compare(layers: _Layers, found: Findings) -> None:
    """Compare the same rows, alone and among others, in tiles of each size."""
    sizes = (16, 32, 64, 128) if layers.form is Form.BF16 else (8, 32, 64)
    wanted: np.ndarray | None = None
    differing = []
    for tile_rows in (None, *sizes):
        for num_rows in (1, 7, 64, 1000, 4096):
            values = _results(layers, num_rows, tile_rows)
            if values is None:
                continue
            if wanted is None:
                wanted = values
                found[f"error_experts_{layers.form.name}"] = error = _error(layers)
                assert error < MOST_ERROR, error
            rows = min(len(wanted), num_rows)
            if not np.array_equal(values[:rows], wanted[:rows]):
                gap = np.abs(values[:rows] - wanted[:rows]).max()
                differing.append(f"{num_rows} rows in tiles of {tile_rows}: {gap:.3g}")
            if num_rows > len(wanted):
                wanted = values
    found[f"bits_experts_{layers.form.name}"] = "; ".join(differing) or "equal"
    print(f"experts in {layers.form.name}:", differing or "equal", flush=True)
    assert not differing, differing


def _results(layers: _Layers, num_rows: int, tile_rows: int | None) -> np.ndarray | None:
    """Return a layer's results; None where a card is only planned for."""
    if layers.card.is_real:
        return layers.results(num_rows, tile_rows)
    layers.layer(0, num_rows, tile_rows)
    return None


def _error(layers: _Layers) -> float:
    """Return how far the first row's first pair is from float64, of weights in bfloat16."""
    mixture, card, memory = layers.mixture, layers.card, layers.memory
    own = layers.weights.layers[0].experts
    assert own is not None
    if layers.form is not Form.BF16:
        return 0.0
    inner, hidden = mixture.inner_size, layers.spec.hidden_size
    # A number that is none is another expert's here, whose results differ.
    expert = int(layers.integers("experts", 1)[0]) % mixture.num_experts
    layers.set_rows(1)
    row = card.floats(memory["normed"], hidden).astype(np.float64)
    size = 2 * inner * hidden
    both = card.floats(own.gate_up.address + 2 * expert * size, size).reshape(-1, hidden) @ row
    down = card.floats(own.down.address + expert * size, size // 2).reshape(hidden, inner)
    gate, up = both[:inner], both[inner:]
    exact = down.astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up)
    result = card.floats(memory["pair_results"], hidden)
    return float(np.linalg.norm(result - exact) / np.linalg.norm(exact))


def _time(layers: _Layers, found: Findings, num_rows: int) -> None:
    """Time each kernel in every layer, and keep the products' beside the bytes that they read."""
    card, spec, mixture = layers.card, layers.spec, layers.mixture
    by_layer = [layers.layer(index, num_rows) for index in range(spec.num_layers)]
    if not card.is_real:
        return
    layers.set_rows(num_rows)
    names = ("gate", "choose", "list", "gate_up", "down", "sum")
    times = {
        name: card.graph_milliseconds([own[place] for own in by_layer], 3) / spec.num_layers
        for place, name in enumerate(names)
    }
    # The last layer's choice, which the products of all layers were timed with.
    sent = layers.integers("experts", num_rows * mixture.num_chosen)
    num_sent, read = len(np.unique(sent)), read_gb_s(card, found)
    result: dict[str, Any] = {f"{name}_us": round(1e3 * ms, 2) for name, ms in times.items()}
    result["experts"] = num_sent
    own = layers.weights.layers[0].experts
    assert own is not None
    for name, matrix in (("gate_up", own.gate_up), ("down", own.down)):
        num_bytes = matrix.num_bytes * num_sent // mixture.num_experts
        flops = 2 * len(sent) * matrix.num_outputs // mixture.num_experts * matrix.num_inputs
        result[f"{name}_gb_s"] = round(num_bytes / times[name] / 1e6)
        result[f"{name}_share"] = round(num_bytes / times[name] / 1e6 / read, 3)
        result[f"{name}_tflops"] = round(flops / times[name] / 1e9, 1)
    label = f"{num_rows} {layers.form.name}"
    found.setdefault("all_experts", {})[label] = result
    print(f"experts, {label}: {result}", flush=True)


def experts_step(card: Any, found: Findings) -> None:
    """Whole decoding steps, with as many of the model's layers as a card holds."""
    for form in (Form.BF16, Form.Q4_0):
        layer_bytes = 128 * 3 * 768 * 2048 * form.bits // 8 + 2 * NUM_BLOCKS * 65536
        room = card.device.properties.memory_bytes - _OTHER_BYTES
        num_layers = min(NUM_LAYERS, max(room // layer_bytes, 1))
        layers = _Layers(card, spec_of(num_layers), form, 1)
        try:
            for count in (1, 8, 32, 128):
                step = started_step(card, layers.launches, count, CONTEXT)
                if card.is_real:
                    step.capture()
                    spent = round(card.milliseconds(step.run, 20, 5), 3)
                    label = f"{count} {form.name}, {num_layers} of {NUM_LAYERS} layers"
                    found.setdefault("experts_step", {})[label] = spent
                    print(f"step of {label}: {spent} ms", flush=True)
                step.close()
        finally:
            if card.is_real:
                layers.close()
