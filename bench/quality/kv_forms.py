"""How far forms of stored keys and values move a model's answers from those over float32.

    python -m bench.quality.kv_forms --json

Computes the first windows of a text by the Paddle back end in float32, once for each form. What the
cache takes is rounded as the form rounds it, and stored in float32. The figures are those of
`bench.quality.divergence`, by form:

    bfloat16     a number in 16 bits
    int8_scaled  a byte, and a scale for each token and head: what `--kv-cache-dtype int8` stores
    fp8_scaled   e4m3 in a byte, and a scale for each token and head
    fp8          e4m3 in a byte, without a scale
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import numpy as np

from bench.command import flags_of, print_figures
from bench.quality.divergence import Distances, all_logits, distances, figures, joined
from bench.quality.perplexity import TEXT, kv_bytes, windows
from common.settings.config import EngineConfig, ModelConfig
from engine.runner.cache.kv_formats import stored_slots, widened_slots
from engine.runner.model_runner import ModelRunner
from engine.runner.paddle import attention
from engine.runner.paddle_import import paddle
from engine.runner.start.load import load_model_runner
from pdserve.checkpoints.resolve import resolve_checkpoint
from router.text.text_model import TextModel

_LARGEST_E4M3, _LEAST_EXPONENT, _FRACTION_BITS = np.float32(448), -6, 3
_ROWS = 64

Form = Callable[[np.ndarray], np.ndarray]


def rounded_to_e4m3(numbers: np.ndarray) -> np.ndarray:
    """Return the nearest numbers of e4m3 (OCP 8-bit floating point, 2023), ties to even.

    What is beyond 448 becomes 448.
    """
    exponents = np.maximum(np.frexp(numbers)[1] - 1, _LEAST_EXPONENT)
    steps = np.ldexp(np.float32(1), exponents - _FRACTION_BITS)
    near = np.rint(numbers / steps) * steps
    clipped: np.ndarray = np.clip(near, -_LARGEST_E4M3, _LARGEST_E4M3).astype(np.float32)
    return clipped


def scaled_e4m3(rows: np.ndarray) -> np.ndarray:
    """Return rows `[…, head_dim]` as e4m3 with a scale of their own gives them back."""
    largest = np.abs(rows).max(-1, keepdims=True)
    scales = np.where(largest == 0, np.float32(1), largest / _LARGEST_E4M3)
    rounded: np.ndarray = rounded_to_e4m3(rows / scales) * scales
    return rounded


def _as_stored(dtype: str) -> Form:
    def form(rows: np.ndarray) -> np.ndarray:
        flat = rows.reshape(-1, rows.shape[-1])
        wide: np.ndarray = widened_slots(stored_slots(flat, dtype), dtype).reshape(rows.shape)
        return wide

    return form


FORMS: Mapping[str, Form] = {
    "bfloat16": _as_stored("bfloat16"),
    "int8_scaled": _as_stored("int8"),
    "fp8_scaled": scaled_e4m3,
    "fp8": rounded_to_e4m3,
}


def logits_over(runner: ModelRunner, text: Sequence[int], form: Form) -> np.ndarray:
    """Return the logits after each token but the last, over a cache that holds `form`'s numbers."""
    store = attention.stored_items

    def rounding(values: paddle.Tensor, dtype: str) -> paddle.Tensor:
        return store(paddle.to_tensor(form(values.numpy())), dtype)

    with mock.patch.object(attention, "stored_items", rounding):
        return all_logits(runner, text)


def measure(runner: ModelRunner, texts: Sequence[Sequence[int]]) -> dict[str, Distances]:
    """Return the distances of each form from float32, over the same tokens."""
    found: dict[str, list[Distances]] = {name: [] for name in FORMS}
    for text in texts:
        wanted, following = all_logits(runner, text), np.asarray(text[1:])
        for name, form in FORMS.items():
            logits = logits_over(runner, text, form)
            for first in range(0, len(following), _ROWS):
                part = slice(first, first + _ROWS)
                found[name].append(distances(wanted[part], logits[part], following[part]))
    return {name: joined(parts) for name, parts in found.items()}


def run(options: argparse.Namespace) -> dict[str, object]:
    """Load, measure, and return the figures."""
    folder, context = resolve_checkpoint(options.model), options.context
    text = TEXT.read_text(encoding="utf-8")
    token_ids = TextModel.load(folder, "", 0).encode(text, add_special_tokens=False, param="text")
    runner = load_model_runner(
        ModelConfig(model=str(folder), max_model_len=context, activation_dtype="float32"),
        EngineConfig(
            block_size=64, kv_cache_memory=kv_bytes(folder, context), kv_cache_dtype="float32",
            max_num_batched_tokens=512, max_num_seqs=4, attention_backend="paddle",
        ),
    )  # fmt: skip
    texts = windows(list(token_ids), context)[: options.windows]
    found = measure(runner, texts)
    return {**figures(found), "settings": {"model": options.model, "context": context}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print one JSON line last."""
    parser = flags_of("bench.quality.kv_forms", __doc__)
    parser.add_argument("--model", default="demo", help="as --model of a node")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=8, help="windows of the novel")
    options = parser.parse_args(arguments)
    if options.context < 2 or options.windows < 1:
        parser.error("wanted a context of at least 2 tokens, and at least one window")
    print_figures(run(options), is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
