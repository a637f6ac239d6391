"""How far the default arithmetic is from float32: `python -m bench.quality.divergence --json`.

A node computes a text twice, with float32 activations and as it does by default. Perplexity needs
tens of thousands of tokens to tell one arithmetic from another, because the errors of a token's
probability go either way; the divergence of the whole distributions needs a few hundred.

With `--peer-python PYTHON`, an interpreter that has llama-cpp-python, llama.cpp computes the same
tokens with the same GGUF file, and is compared with float32 in the same way.

    perplexity          of float32, the default and the peer
    loss                its perplexity / that of float32 - 1
    loss_error          the standard error of that, from the differences of the tokens' -ln p
    divergence          Kullback-Leibler divergence of float32 from it, the mean of tokens, in nats
    divergence_error    the standard error of that
    other_choices       the share of tokens after which another one is the likeliest
    largest_margin      between those two, in logits of float32
    num_tokens          tokens that count: all of a window but its first
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.command import flags_of, print_figures
from bench.quality.perplexity import TEXT, kv_bytes, loss, windows
from common.settings.config import EngineConfig, ModelConfig
from engine.runner.model_runner import ModelRunner
from engine.runner.start.load import load_model_runner
from pdserve.checkpoints.resolve import resolve_checkpoint
from router.text.text_model import TextModel

EXACT, DEFAULT, PEER = "float32", "default", "llama.cpp"
_PEER_TIMEOUT_S = 1800
_ROWS = 64
"""Whose probabilities are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Distances:
    """The measurements of each token of a text: `[tokens]` arrays.

    `exact` and `other` are the token's ln p in both arithmetics. `margin` is 0 where both have the
    same likeliest token.
    """

    exact: np.ndarray
    other: np.ndarray
    divergence: np.ndarray
    margin: np.ndarray


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return ln p of every token for rows of logits, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def distances(exact: np.ndarray, other: np.ndarray, following: np.ndarray) -> Distances:
    """Compare two arithmetics' logits `[tokens, vocabulary]` before the tokens `following`."""
    p, q, rows = log_softmax(exact), log_softmax(other), np.arange(len(following))
    best, chosen = p.argmax(axis=1), q.argmax(axis=1)
    return Distances(
        exact=p[rows, following],
        other=q[rows, following],
        divergence=(np.exp(p) * (p - q)).sum(axis=1),
        margin=p[rows, best] - p[rows, chosen],
    )


def joined(parts: Sequence[Distances]) -> Distances:
    """Return the distances of several texts as those of one."""
    names = ("exact", "other", "divergence", "margin")
    return Distances(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def figures(found: dict[str, Distances]) -> dict[str, object]:
    """Return the figures of each arithmetic, by its name, of the same tokens."""
    first = next(iter(found.values()))
    rows: dict[str, dict[str, float]] = {
        "perplexity": {EXACT: round(float(np.exp(-first.exact.mean())), 4)}
    }
    for name, one in found.items():
        lost, lost_error = loss(one.exact, one.other)
        values = {
            "perplexity": round(float(np.exp(-one.other.mean())), 4),
            "loss": lost,
            "loss_error": lost_error,
            "divergence": round(float(one.divergence.mean()), 6),
            "divergence_error": round(float(one.divergence.std() / len(one.exact) ** 0.5), 6),
            "other_choices": round(float((one.margin > 0).mean()), 4),
            "largest_margin": round(float(one.margin.max()), 3),
        }
        for key, value in values.items():
            rows.setdefault(key, {})[name] = value
    return {**rows, "num_tokens": len(first.exact)}


def load(folder: Path, activation_dtype: str, context: int, num_threads: int) -> ModelRunner:
    """Load the model as a node does, with a KV cache in float32 for one window."""
    return load_model_runner(
        ModelConfig(model=str(folder), max_model_len=context, activation_dtype=activation_dtype),
        EngineConfig(
            block_size=64, kv_cache_memory=kv_bytes(folder, context), num_threads=num_threads,
            max_num_batched_tokens=512, max_num_seqs=64, kv_cache_dtype="float32",
        ),
    )  # fmt: skip


def all_logits(runner: ModelRunner, text: Sequence[int]) -> np.ndarray:
    """Return the logits after each token but the last, `[tokens, vocabulary]`."""
    return np.concatenate([rows.copy() for rows in runner.logits_of_all(text)])


def measure(
    folder: Path, texts: Sequence[Sequence[int]], num_threads: int, peer: np.ndarray | None = None
) -> dict[str, Distances]:
    """Return the distances of the default arithmetic from float32, and of the `peer`'s logits."""
    exact, ours = (load(folder, kind, len(texts[0]), num_threads) for kind in (EXACT, "auto"))
    found: dict[str, list[Distances]] = {}
    for number, text in enumerate(texts):
        wanted, following = all_logits(exact, text), np.asarray(text[1:])
        others = {DEFAULT: all_logits(ours, text)}
        if peer is not None:
            others[PEER] = peer[number, :-1]
        for name, logits in others.items():
            found.setdefault(name, [])
            for first in range(0, len(following), _ROWS):
                part = slice(first, first + _ROWS)
                found[name].append(distances(wanted[part], logits[part], following[part]))
    return {name: joined(parts) for name, parts in found.items()}


def peer_logits(
    python: str, folder: Path, texts: Sequence[Sequence[int]], num_threads: int, out: Path
) -> np.ndarray:
    """Return llama.cpp's logits `[windows, context, vocabulary]`, in a file at `out`."""
    command = [
        python, "-m", "bench.engine.llama_cpp_logits", str(folder / "weights.gguf"),
        str(num_threads), str(out),
    ]  # fmt: skip
    subprocess.run(
        command, input=json.dumps([list(text) for text in texts]), text=True, check=True,
        timeout=_PEER_TIMEOUT_S, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    logits: np.ndarray = np.load(out, mmap_mode="r")
    return logits


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the figures."""
    folder = resolve_checkpoint(options.model)
    model = TextModel.load(folder, "", 0)
    texts: list[Sequence[int]] = []
    for path in options.text or [TEXT]:
        text = path.read_text(encoding="utf-8")
        token_ids = list(model.encode(text, add_special_tokens=False, param="text"))
        texts += windows(token_ids, options.context)[: options.windows or None]
    if not texts:
        sys.exit(f"the texts are too short: wanted {options.context} tokens or more")
    with tempfile.TemporaryDirectory(prefix="pdserve-logits-") as made:
        peer = None
        if options.peer_python:
            out = Path(made, "logits.npy")
            peer = peer_logits(options.peer_python, folder, texts, options.num_threads, out)
        found = measure(folder, texts, options.num_threads, peer)
    return {**figures(found), "settings": {"model": options.model, "context": options.context}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print one JSON line last."""
    parser = flags_of("bench.quality.divergence", __doc__)
    parser.add_argument("--model", default="demo", help="as --model of a node")
    parser.add_argument("--text", type=Path, action="append", help="default: a novel")
    parser.add_argument("--context", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=16, help="most of a text; 0: all of it")
    parser.add_argument("--num-threads", type=int, default=0)
    parser.add_argument("--peer-python", default="", help="a Python that has llama-cpp-python")
    options = parser.parse_args(arguments)
    if options.context < 2 or options.windows < 0:
        parser.error("wanted a context of at least 2 tokens, and no negative number of windows")
    print_figures(run(options), is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
