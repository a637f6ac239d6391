"""What a model loses by fewer bits: `python -m bench.perplexity --json`.

The perplexity of a text, e to the mean of -ln p over its tokens, under each combination of the
settings in `AXES`, which are those of a node; the flag of each chooses other values. The weights
have the format of the model's file, or that of --quantization. The text is divided into windows of
`--context` tokens. Each is computed for itself, and its first half is only context, as in
llama.cpp's tool of this name: the first tokens of a text are hard to foretell, and would hide the
rest.

It takes minutes. With `--keep FOLDER` the scores of each window are written there as soon as they
are known, and the same command continues where it was ended.

    perplexity       for each combination
    loss             its perplexity / that of the first combination - 1
    loss_error       the standard error of that, from the differences of the tokens' -ln p
    num_tokens       tokens that count, the same ones for all
    kv_block_bytes   bytes of a KV block over all layers, keys and values
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path

import numba
import numpy as np

from common.blocks import blocks_for
from common.cache_folder import cache_root
from common.config import EngineConfig, ModelConfig
from common.kv_layout import KVLayout
from engine.runner.load import load_model_runner
from engine.runner.model_runner import ModelRunner
from engine.runner.model_spec import read_decoder_spec
from pdserve.checkpoints.resolve import resolve_checkpoint
from pdserve.configuration.options import all_options
from router.text.text_model import TextModel

TEXT = Path(__file__).parent / "texts" / "alice_in_wonderland.txt"
AXES: Mapping[str, tuple[str, ...]] = {
    "quantization": ("none",),
    "activation_dtype": ("float32", "int8"),
    "kv_cache_dtype": ("float32", "bfloat16", "int8"),
}
"""Settings of a model or an engine; the first values are what others are compared with."""
_BLOCK_SIZE = 64
_SPARE_BLOCKS = 2
"""Beside those of a window: a cache keeps one for one more step."""
_MODEL_SETTINGS = {field.name for field in fields(ModelConfig)}

Settings = Mapping[str, str]


def windows(token_ids: Sequence[int], context: int) -> list[Sequence[int]]:
    """Return windows of `context` tokens; what is left after the last one does not count."""
    ends = range(context, len(token_ids) + 1, context)
    return [token_ids[end - context : end] for end in ends]


def figures(scores: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Return perplexities and losses from each combination's ln p of the same tokens.

    The first combination is the one that the others are compared with.
    """
    exact = next(iter(scores.values()))
    found: dict[str, dict[str, float]] = {"perplexity": {}, "loss": {}, "loss_error": {}}
    for name, score in scores.items():
        ratio = float(np.exp((exact - score).mean()))
        error = float((exact - score).std() / len(score) ** 0.5)
        found["perplexity"][name] = round(float(np.exp(-score.mean())), 4)
        found["loss"][name] = round(ratio - 1, 6)
        found["loss_error"][name] = round(ratio * error, 6)
    return {"num_tokens": len(exact), **found}


def score(runner: ModelRunner, text: Sequence[int]) -> np.ndarray:
    """Return ln p of the tokens in the second half of a window."""
    return runner.log_likelihoods(text)[len(text) // 2 :]


def sources_digest() -> str:
    """Return the digest of the kernels' sources, which their cache folder is named after."""
    return Path(numba.config.CACHE_DIR).name


def kept_score(runner: ModelRunner, text: Sequence[int], folder: Path | None) -> np.ndarray:
    """Return the `score` that an earlier run has left in `folder`, or compute and leave it.

    Its file is named after the layout, whose digest covers weights and arithmetic, the kernels'
    sources, and the tokens.
    """
    if folder is None:
        return score(runner, text)
    layout = runner.layout
    key = f"{layout.model_digest} {layout.dtype} {sources_digest()} {list(text)}"
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        found = score(runner, text)
        with (building := path.with_suffix(".building")).open("wb") as file:
            np.save(file, found)
        building.rename(path)
    loaded: np.ndarray = np.load(path)
    return loaded


def kv_bytes(folder: Path, context: int) -> int:
    """Return the bytes of a KV cache for one window, in float32, the widest of all formats."""
    spec = read_decoder_spec(folder)
    layout = KVLayout(
        model_digest="", num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, block_size=_BLOCK_SIZE, dtype="float32",
    )  # fmt: skip
    return (blocks_for(context, _BLOCK_SIZE) + _SPARE_BLOCKS) * layout.block_bytes


def load(folder: Path, settings: Settings, context: int, num_threads: int) -> ModelRunner:
    """Load the model with some settings, and a KV cache for one window."""
    of_model = {key: value for key, value in settings.items() if key in _MODEL_SETTINGS}
    of_engine = {key: value for key, value in settings.items() if key not in _MODEL_SETTINGS}
    return load_model_runner(
        ModelConfig(model=str(folder), max_model_len=context, **of_model),
        EngineConfig(
            block_size=_BLOCK_SIZE, kv_cache_memory=kv_bytes(folder, context),
            num_threads=num_threads, max_num_batched_tokens=512, max_num_seqs=64,
            **of_engine,  # type: ignore[arg-type]
        ),
        packed_folder=cache_root() / "packed",
    )  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure every combination that was asked for, one after another."""
    folder = resolve_checkpoint(options.model)
    model = TextModel.load(folder, "", 0)
    text = options.text.read_text(encoding="utf-8")
    token_ids = model.encode(text, add_special_tokens=False, param="text")
    texts = windows(list(token_ids), options.context)[: options.windows or None]
    if not texts:
        sys.exit(f"{options.text} has {len(token_ids)} tokens: wanted {options.context} or more")
    runners = {}
    for values in product(*(getattr(options, key) or AXES[key] for key in AXES)):
        settings = dict(zip(AXES, values, strict=True))
        name = " ".join(f"{key}={value}" for key, value in settings.items())
        runners[name] = load(folder, settings, options.context, options.num_threads)
    scores: dict[str, list[np.ndarray]] = {name: [] for name in runners}
    # Windows outside, so that all combinations have the same ones whenever the command is ended.
    for number, text_ids in enumerate(texts):
        print(f"window {number + 1} of {len(texts)}", file=sys.stderr)
        for name, runner in runners.items():
            scores[name].append(kept_score(runner, text_ids, options.keep))
    block_bytes = {name: runner.layout.block_bytes for name, runner in runners.items()}
    return {
        **figures({name: np.concatenate(parts) for name, parts in scores.items()}),
        "kv_block_bytes": block_bytes,
        "settings": {"model": options.model, "text": options.text.name, "context": options.context},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print one JSON line last."""
    parser = argparse.ArgumentParser(prog="python -m bench.perplexity", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="one JSON line and no indentation")
    parser.add_argument("--model", default="demo", help="as --model of a node")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--context", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=0, help="most windows; 0: all of the text")
    parser.add_argument("--keep", type=Path, help="folder for scores of windows, to continue with")
    parser.add_argument("--num-threads", type=int, default=0)
    for key, values in AXES.items():
        choices = all_options()[key].declared.one_of
        flag, default = f"--{key.replace('_', '-')}", f"default: {' '.join(values)}"
        parser.add_argument(flag, action="append", choices=choices, help=default)
    options = parser.parse_args(arguments)
    if options.context < 2 or options.windows < 0:
        parser.error("wanted a context of at least 2 tokens, and no negative number of windows")
    print(json.dumps(run(options), indent=None if options.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
