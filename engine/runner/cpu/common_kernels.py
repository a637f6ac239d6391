"""The CPU kernels that every model needs, compiled before a model is loaded.

They do not depend on a model's sizes, so a small model of constant weights compiles them. Products
with float32 weights are among them, whatever formats the model has. The nodes of a machine that
start together divide them: see `compile_once.compile_together`. Layers with experts are compiled
for models that have some, after what they share with others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common.kv.kv_layout import KVLayout
from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.back_end import StepShape
from engine.runner.cache.contract import MIN_BLOCKS
from engine.runner.cache.kv_cache import KVCache
from engine.runner.cpu.compile_once import compile_together
from engine.runner.cpu.decoder import NumbaDecoder
from engine.runner.flat_batch import BatchLimits, FlatBatch, flatten
from engine.runner.kernels.attention import STATE_LANES, attention_phase
from engine.runner.kernels.attention_plan import NO_WINDOW, PART_ROWS
from engine.runner.kernels.team import new_progress
from engine.runner.weights.spec.decoder_tensors import expected_shapes
from engine.runner.weights.spec.expert_mixture import ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.spec.rope_spec import RopeSpec
from engine.runner.weights.stored_tensor import GroupedTensor
from engine.runner.weights.tensor_source import TensorSource

_SPEC = DecoderSpec(
    architecture="constant", num_layers=1, hidden_size=32, intermediate_size=32, num_heads=2,
    num_kv_heads=1, head_dim=16, vocab_size=256, max_position=64, rms_epsilon=1e-5,
    rope=RopeSpec(kind="default", theta=1e4), is_rope_interleaved=False, has_tied_embeddings=True,
    has_qkv_bias=False, has_output_bias=False, has_mlp_bias=False, has_head_norms=False,
)  # fmt: skip
_EXPERTS = replace(
    _SPEC,
    experts=ExpertMixture(
        layers=(0,), num_experts=2, num_chosen=1, inner_size=32, shared_size=32,
        is_normalised=True, least_sum=0.0, has_choice_bias=True,
    ),
)  # fmt: skip
_BLOCK_SIZE = 16
_LIMITS = BatchLimits(
    max_tokens=8, max_len=_SPEC.max_position, num_blocks=MIN_BLOCKS, block_size=_BLOCK_SIZE,
    vocab_size=_SPEC.vocab_size,
)  # fmt: skip
_WAYS = (
    SamplingParams(max_tokens=1, temperature=0.0, logprobs=1),
    SamplingParams(
        max_tokens=1, temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1,
        presence_penalty=0.1, frequency_penalty=0.1,
    ),
)  # fmt: skip


def compile_common_kernels(*, has_experts: bool) -> None:
    """Compile what no process of this machine has compiled yet.

    A layer comes to its attention when the first half is compiled, so another process that begins
    with attention has compiled it by then. The two then take about equally long.
    """
    compile_together(
        {
            "layers and logits": compile_layers,
            "attention": compile_attention,
            "draws": compile_draws,
        }
    )
    if has_experts:
        compile_together({"layers with experts": compile_expert_layers})


def compile_layers() -> None:
    _compute_layer(_SPEC)


def compile_expert_layers() -> None:
    _compute_layer(_EXPERTS)


def _compute_layer(spec: DecoderSpec) -> None:
    shape = StepShape(num_tokens=_LIMITS.max_tokens, num_seqs=1, num_logits_rows=1)
    decoder = NumbaDecoder(spec, _Constant(spec), _cache(), _LIMITS.max_len, shape)
    sequence = ScheduledSequence(0, [1, 2, 3], 0, [0], None)
    hidden = decoder.begin(flatten(batch_of([sequence]), _LIMITS))
    decoder.run_layer(0, hidden)
    decoder.logits(hidden, np.array([2]))


def compile_attention() -> None:
    """Attend from one token to itself."""
    heads, head_dim = _SPEC.num_heads, _SPEC.head_dim
    # Not from `plan_attention`, which the process that compiles layers compiles.
    items = np.array([[0, 0, 1, 0, -1, 0]])
    attention_phase(
        new_progress(1)[0],
        np.zeros((1, heads + 2 * _SPEC.num_kv_heads, head_dim), np.float32),
        *_cache().slots()[0],
        np.zeros((1, 1), np.int64),
        np.zeros(1, np.int64),
        NO_WINDOW,
        items,
        np.zeros(0, np.float32),
        np.zeros((PART_ROWS, head_dim + STATE_LANES), np.float32),
        np.zeros((1, heads, head_dim), np.float32),
    )


def compile_draws() -> None:
    # Imported late: these kernels are compiled by their import.
    from engine.runner.drawing.draws import HostDraw, accept_drafts
    from engine.runner.drawing.sampler import sampled_rows

    vocab_size = _SPEC.vocab_size
    host_draw = HostDraw(_NoLayers(), vocab_size)
    for way in _WAYS:
        sample = SampleInput(way, 0, [1, 2], [])
        batch = batch_of([ScheduledSequence(0, [2], 1, [0], sample)])
        flat = flatten(batch, _LIMITS)
        rows = sampled_rows(batch, vocab_size, frozenset({0}))
        accept_drafts(batch, host_draw.draw(None, flat.sampled_rows, rows, batch))


def _cache() -> KVCache:
    layout = KVLayout(
        model_digest="constant", num_layers=_SPEC.num_layers, num_kv_heads=_SPEC.num_kv_heads,
        head_dim=_SPEC.head_dim, block_size=_BLOCK_SIZE, dtype="float32",
    )  # fmt: skip
    return KVCache(layout, MIN_BLOCKS * layout.block_bytes)


class _NoLayers:
    """A `Decoder` with equal logits."""

    num_layers = 0

    def begin(self, batch: FlatBatch) -> Any:
        return np.zeros((batch.token_ids.size, 1), np.float32)

    def run_layer(self, index: int, hidden: Any) -> None:
        raise AssertionError("there are no layers")

    def logits(self, hidden: Any, rows: np.ndarray) -> np.ndarray:
        return np.zeros((len(rows), _SPEC.vocab_size), np.float32)


class _Constant(TensorSource):
    """The weights of a decoder, all equal, in float32."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.metadata: dict[str, str] = {}
        self._shapes: Mapping[str, tuple[int, ...]] = expected_shapes(spec)

    def names(self) -> Iterable[str]:
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Accept: every tensor is as it is asked for."""

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        *outputs, inputs = self._shapes[name]
        return "F32", (outputs[0] if outputs else 1, inputs)

    def grouped(self, name: str) -> GroupedTensor:
        stored, shape = self.format_and_shape(name)
        return GroupedTensor(stored, shape, np.full(shape, 0.1, np.float32).view(np.uint8))

    def identity(self) -> str:
        return "constant"

    def stamps(self) -> list[list[int]]:
        return []
