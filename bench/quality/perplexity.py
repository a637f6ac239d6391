"""What a model loses by fewer bits: `python -m bench.quality.perplexity --json`.

The perplexity of a text, e to the mean of -ln p over its tokens, with the weights in each format
(`bench.quality.weight_folders`) under each combination of the settings in `SETTINGS`, which are
those of a node. The flag of each chooses other values. Weights without groups are computed in
float32 only: int8 changes nothing there. Values of a format in float32 are computed once, for
comparison.

The text is divided into windows of `--context` tokens. Each is computed for itself, and its first
half is only context, as in llama.cpp's tool of this name: the first tokens of a text are hard to
foretell, and would hide the rest.

It takes an hour or more. With `--keep FOLDER` the scores of each window are written there as soon
as they are known, and the same command continues where it was ended.

    perplexity           of each combination
    perplexity_error     the standard error of that, over the tokens
    loss                 its perplexity / that of the first combination - 1
    loss_error           the standard error of that, from the differences of the tokens' -ln p
    goals                losses that have a goal, each against the combination that it is named with
    num_tokens           tokens that count, the same ones for all
    kv_block_bytes       bytes of a KV block over all layers, keys and values, by its dtype
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np

from bench.command import flags_of, print_figures
from bench.quality.weight_folders import (
    ALL_WEIGHTS,
    AS_F32,
    FILE,
    WIDE,
    WeightFolder,
    weight_folder,
)
from common.kv.blocks import blocks_for
from common.kv.kv_layout import KVLayout
from common.settings.config import EngineConfig, ModelConfig
from engine.runner.model_runner import ModelRunner
from engine.runner.start.load import load_model_runner
from engine.runner.weights.spec.model_spec import read_decoder_spec
from pdserve.checkpoints.resolve import resolve_checkpoint
from router.text.text_model import TextModel

TEXT = Path(__file__).parents[1] / "texts" / "alice_in_wonderland.txt"
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "activation_dtype": ("float32", "int8"),
    "kv_cache_dtype": ("float32", "bfloat16", "int8"),
}
"""Settings of a node; the first values are what others are compared with."""
GOALS = {"weights": 0.001, "activation_dtype": 0.01, "kv_cache_dtype": 0.005}
"""The largest loss by weights in their bits, by int8 activations and by an int8 KV cache."""
_BLOCK_SIZE = 64
_SPARE_BLOCKS = 2
"""Beside those of a window: a cache keeps one for one more step."""


class Combination(NamedTuple):
    """Weights of `ALL_WEIGHTS`, and a value of each setting."""

    weights: str
    activation_dtype: str
    kv_cache_dtype: str

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self._asdict().items())

    @property
    def goal(self) -> tuple[str, Combination] | None:
        """Return the key of its goal in `GOALS`, and what it is compared with; None if none."""
        if self.kv_cache_dtype == "int8":
            return "kv_cache_dtype", self._replace(kv_cache_dtype="float32")
        if self.activation_dtype == "int8":
            return "activation_dtype", self._replace(activation_dtype="float32")
        if self.kv_cache_dtype != "float32" or self.weights.endswith(AS_F32):
            return None
        return "weights", self._replace(weights=values_of(self.weights))


def values_of(weights: str) -> str:
    """Return which weights are the values of `weights` in float32."""
    return "f32" if weights in (FILE, "f32") else f"{weights}{AS_F32}"


def combinations(
    weights: Sequence[str], activation_dtypes: Sequence[str], kv_cache_dtypes: Sequence[str]
) -> list[Combination]:
    """Return what is measured, in order: all that differ in more than name."""
    exact = {key: values[0] for key, values in SETTINGS.items()}
    found = []
    for values in product(weights, activation_dtypes, kv_cache_dtypes):
        one = Combination(*values)
        has_groups = one.weights not in WIDE and not one.weights.endswith(AS_F32)
        if one.activation_dtype != exact["activation_dtype"] and not has_groups:
            continue
        if one.kv_cache_dtype != exact["kv_cache_dtype"] and one.weights.endswith(AS_F32):
            continue
        found.append(one)
    return found


def windows(token_ids: Sequence[int], context: int) -> list[Sequence[int]]:
    """Return windows of `context` tokens; what is left after the last one does not count."""
    ends = range(context, len(token_ids) + 1, context)
    return [token_ids[end - context : end] for end in ends]


def loss(exact: np.ndarray, score: np.ndarray) -> tuple[float, float]:
    """Return the loss by ln p of `score` against `exact`, and its standard error."""
    ratio = float(np.exp((exact - score).mean()))
    error = float((exact - score).std() / len(score) ** 0.5)
    return round(ratio - 1, 6), round(ratio * error, 6)


def figures(scores: Mapping[Combination, np.ndarray]) -> dict[str, object]:
    """Return perplexities and losses from each combination's ln p of the same tokens.

    The first combination is the one that the others are compared with.
    """
    exact = next(iter(scores.values()))
    keys = ("perplexity", "perplexity_error", "loss", "loss_error")
    found: dict[str, dict[str, float]] = {key: {} for key in keys}
    for one, score in scores.items():
        perplexity = float(np.exp(-score.mean()))
        error = perplexity * float(score.std() / len(score) ** 0.5)
        row = (round(perplexity, 4), round(error, 4), *loss(exact, score))
        for key, value in zip(keys, row, strict=True):
            found[key][one.name] = value
    return {"num_tokens": len(exact), **found, "goals": goals(scores)}


def goals(scores: Mapping[Combination, np.ndarray]) -> dict[str, dict[str, dict[str, object]]]:
    """Return what is known about each goal: by its key, then by the combination's name."""
    found: dict[str, dict[str, dict[str, object]]] = {key: {} for key in GOALS}
    for one, score in scores.items():
        if one.goal is None or one.goal[1] not in scores or one.goal[1] == one:
            continue
        key, other = one.goal
        lost, error = loss(scores[other], score)
        found[key][one.name] = {
            "than": other.name, "loss": lost, "loss_error": error, "goal": GOALS[key],
            "holds": lost <= GOALS[key],
        }  # fmt: skip
    return found


def score(runner: ModelRunner, text: Sequence[int]) -> np.ndarray:
    """Return ln p of the tokens in the second half of a window."""
    return runner.log_likelihoods(text)[len(text) // 2 :]


def sources_digest() -> str:
    """Return the digest of the kernels' sources, which their cache folder is named after."""
    return Path(numba.config.CACHE_DIR).name


def kept_score(
    runner: ModelRunner, weights: str, text: Sequence[int], folder: Path | None
) -> np.ndarray:
    """Return the `score` that an earlier run has left in `folder`, or compute and leave it.

    Its file is named after the weights' name, because a layout's digest is the same for some
    formats of the same values; after the layout, whose digest covers values and arithmetic; the
    kernels' sources; and the tokens.
    """
    if folder is None:
        return score(runner, text)
    layout = runner.layout
    key = f"{weights} {layout.model_digest} {layout.dtype} {sources_digest()} {list(text)}"
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        found = score(runner, text)
        with (building := path.with_suffix(".building")).open("wb") as file:
            np.save(file, found)
        building.rename(path)
    loaded: np.ndarray = np.load(path)
    return loaded


def kv_layout(folder: Path, dtype: str) -> KVLayout:
    """Return the layout of a KV cache of this model."""
    spec = read_decoder_spec(folder)
    return KVLayout(
        model_digest="", num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, block_size=_BLOCK_SIZE, dtype=dtype,
    )  # fmt: skip


def kv_bytes(folder: Path, context: int) -> int:
    """Return the bytes of a KV cache for one window, in float32, the widest of all formats."""
    num_blocks = blocks_for(context, _BLOCK_SIZE) + _SPARE_BLOCKS
    return num_blocks * kv_layout(folder, "float32").block_bytes


def load(weights: WeightFolder, one: Combination, context: int, num_threads: int) -> ModelRunner:
    """Load the model with these weights and settings, and a KV cache for one window."""
    return load_model_runner(
        ModelConfig(
            model=str(weights.folder), max_model_len=context, quantization=weights.quantization,
            activation_dtype=one.activation_dtype,
        ),
        EngineConfig(
            block_size=_BLOCK_SIZE, kv_cache_memory=kv_bytes(weights.folder, context),
            num_threads=num_threads, max_num_batched_tokens=512, max_num_seqs=64,
            kv_cache_dtype=one.kv_cache_dtype,
        ),
        packed_folder=weights.packed,
    )  # fmt: skip


def measure(
    model: Path,
    wanted: Sequence[Combination],
    texts: Sequence[Sequence[int]],
    num_threads: int,
    keep: Path | None,
) -> dict[Combination, np.ndarray]:
    """Return each combination's ln p; one model at a time is in memory."""
    scores = {}
    context = len(texts[0])
    for name in dict.fromkeys(one.weights for one in wanted):
        with weight_folder(model, name) as weights:
            for one in wanted:
                if one.weights != name:
                    continue
                runner = load(weights, one, context, num_threads)
                found = [kept_score(runner, name, text, keep) for text in texts]
                scores[one] = np.concatenate(found)
                print(
                    f"{len(scores)} of {len(wanted)}: {one.name}: "
                    f"{np.exp(-scores[one].mean()):.4f}",
                    file=sys.stderr,
                    flush=True,
                )
                del runner  # before the next one is loaded
    return scores


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure every combination that was asked for, one after another."""
    folder = resolve_checkpoint(options.model)
    model = TextModel.load(folder, "", 0)
    text = options.text.read_text(encoding="utf-8")
    token_ids = model.encode(text, add_special_tokens=False, param="text")
    texts = windows(list(token_ids), options.context)[: options.windows or None]
    if not texts:
        sys.exit(f"{options.text} has {len(token_ids)} tokens: wanted {options.context} or more")
    chosen = [getattr(options, key) or values for key, values in SETTINGS.items()]
    wanted = combinations(options.weights or ALL_WEIGHTS, *chosen)
    if not wanted:
        sys.exit("no weights with groups: wanted activation_dtype float32")
    scores = measure(folder, wanted, texts, options.num_threads, options.keep)
    dtypes = dict.fromkeys(one.kv_cache_dtype for one in wanted)
    return {
        **figures(scores),
        "kv_block_bytes": {dtype: kv_layout(folder, dtype).block_bytes for dtype in dtypes},
        "settings": {"model": options.model, "text": options.text.name, "context": options.context},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print one JSON line last."""
    parser = flags_of("bench.quality.perplexity", __doc__)
    parser.add_argument("--model", default="demo", help="as --model of a node")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--context", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=0, help="most windows; 0: all of the text")
    parser.add_argument("--keep", type=Path, help="folder for scores of windows, to continue with")
    parser.add_argument("--num-threads", type=int, default=0)
    for key, values in {"weights": ALL_WEIGHTS, **SETTINGS}.items():
        flag, default = f"--{key.replace('_', '-')}", f"default: {' '.join(values)}"
        parser.add_argument(flag, action="append", choices=values, help=default)
    options = parser.parse_args(arguments)
    if options.context < 2 or options.windows < 0:
        parser.error("wanted a context of at least 2 tokens, and no negative number of windows")
    print_figures(run(options), is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
