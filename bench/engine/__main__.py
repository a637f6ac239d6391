"""Speed of one engine: `python -m bench.engine --json [--peer transformers|llama.cpp]`.

    decode_tok_s_N    tokens per second of a step that decodes N sequences (contexts of 128, 128
                      and 256 tokens for N = 1, 8, 32), greedy sampling included
    decode_tok_s_1_at_6000   the same for one sequence at 6,000 tokens
    sampled_tok_s_32         decode of 32, sampled at temperature 0.8 with top_p 0.95
    penalised_tok_s_32       the same with a repetition penalty of 1.1
    flat_tok_s_32            as sampled_tok_s_32, where thousands of tokens are about as likely
    prefill_tok_s_N   prompt tokens per second of one prompt of N tokens, first token included
    rss_mb            the process's peak memory, MiB
    kv_mb             of it, the KV cache, all of it written before
    one_row           where the time of a step of one row goes (`bench.engine.one_row_step`)

Every figure is the median over rounds. Sampled and penalised answers continue English text; all
other prompts are token ids without a meaning, after which a model's distribution is flat.

With `--peer` the same is measured on transformers (PyTorch, float32, SDPA) or on llama.cpp (the
package llama-cpp-python, the same GGUF file) with the same threads in a process of its own; the two
take turns, measure by measure, so that a noisy machine is noisy for both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.engine import one_row_step
from bench.engine.encoded_text import encoded_elsewhere
from bench.speculation.prompts import SUMMARISE
from common.files.cache_folder import cache_root
from common.request import SamplingParams
from common.settings.config import EngineConfig, ModelConfig
from engine.core.runner_contract import DrawnTokens, SampleInput, ScheduledSequence
from engine.core.sequences.seats import Seats
from engine.core.step.step_batch import StepBatch, batch_of
from engine.runner.cpu.decoder import NumbaDecoder
from engine.runner.start.load import load_model_runner
from pdserve.checkpoints.resolve import resolve_checkpoint

MEASURES = (
    ("decode", 1, 128),
    ("decode", 8, 128),
    ("decode", 32, 256),
    ("sampled", 32, 256),
    ("penalised", 32, 256),
    ("flat", 32, 256),
    ("long", 1, 6000),
    ("prefill", 1, 256),
    ("prefill", 1, 1024),
)
DECODE_STEPS = 8
"""Steps of one round of decoding, of which the median counts."""
_PEER_START_S = 300
_PEER_KINDS = ("decode", "prefill")
_PEERS = {"transformers": "transformers_peer.py", "llama.cpp": "llama_cpp_peer.py"}
"""What `--peer` names, and the script beside this one that runs it."""
_GREEDY = SamplingParams(max_tokens=DECODE_STEPS, temperature=0.0)
_SAMPLED = SamplingParams(max_tokens=DECODE_STEPS, temperature=0.8, top_p=0.95, ignore_eos=True)
_TEXT_KINDS = ("sampled", "penalised")
_PARAMS = {
    "sampled": _SAMPLED,
    "flat": _SAMPLED,
    "penalised": replace(_SAMPLED, repetition_penalty=1.1),
}

Measure = Callable[[str, int, int], float]
"""(kind, sequences, context) → tokens per second."""


def key_of(kind: str, num_sequences: int, context: int) -> str:
    """Return the figure's name in the output."""
    if kind == "prefill":
        return f"prefill_tok_s_{context}"
    if kind == "long":
        return f"decode_tok_s_{num_sequences}_at_{context}"
    return f"{kind}_tok_s_{num_sequences}"


def synthetic_prompt(length: int, sequence: int) -> list[int]:
    """Return token ids that differ between sequences, and mean nothing."""
    return [(7919 * (i + 1) + 104729 * sequence) % 30000 + 3 for i in range(length)]


def text_prompt(text: list[int], length: int, sequence: int) -> list[int]:
    """Return `length` tokens of `text`, from another place for each sequence."""
    start = 37 * sequence
    return [text[(start + i) % len(text)] for i in range(length)]


class EngineUnderTest:
    """This engine, driven like by its step loop."""

    def __init__(
        self,
        folder: Path,
        num_threads: int,
        activation_dtype: str,
        kv_cache_dtype: str,
    ) -> None:
        self._runner = load_model_runner(
            ModelConfig(model=str(folder), activation_dtype=activation_dtype),
            EngineConfig(
                num_threads=num_threads, kv_cache_memory=512 << 20, kv_cache_dtype=kv_cache_dtype
            ),
            packed_folder=cache_root() / "packed",
        )
        self._runner.kv_bytes[:] = 0  # so that all of it is in the process's memory
        self.kv_mb = self._runner.kv_bytes.nbytes / 2**20
        self._runner.warm_up()
        self._block_size = self._runner.layout.block_size
        self._text = encoded_elsewhere(folder, " ".join(SUMMARISE))

    def measure(self, kind: str, num_sequences: int, context: int) -> float:
        blocks = -(-(context + DECODE_STEPS + 1) // self._block_size)
        tables = [range(i * blocks, (i + 1) * blocks) for i in range(num_sequences)]
        prompts = [self._prompt(kind, context, i) for i in range(num_sequences)]
        params = _PARAMS.get(kind, _GREEDY)
        started_s = time.perf_counter()
        if kind == "long":
            # The time of a step does not depend on what the cache contains. The tokens differ, as a
            # mixture would send equal ones to the same experts.
            last = [prompt[-1] for prompt in prompts]
        else:
            last = [self._first(p, t) for p, t in zip(prompts, tables, strict=True)]
        if kind == "prefill":
            return context / (time.perf_counter() - started_s)
        decoding = _Decoding(prompts, last, tables, params)
        spans_s = []
        for _ in range(DECODE_STEPS):
            started_s = time.perf_counter()
            drawn = self._runner.execute(decoding.batch())
            spans_s.append(time.perf_counter() - started_s)
            decoding.append(drawn)
        return num_sequences / statistics.median(spans_s)

    def one_row_parts(self) -> dict[str, float]:
        """Return where the time of a step of one row goes."""
        length = one_row_step.CONTEXT
        table = range(-(-(length + 1) // self._block_size))
        self._first(synthetic_prompt(length, 0), table)
        batch = _Decoding([[0] * length], [0], [table], _GREEDY).batch()
        kv_bytes = self._runner.kv_bytes.nbytes // self._runner.num_blocks // self._block_size
        decoder = self._runner._decoder
        assert isinstance(decoder, NumbaDecoder)
        return one_row_step.measure_parts(
            decoder,
            lambda: self._runner.execute(batch),
            kv_bytes * length,
        )

    def _prompt(self, kind: str, context: int, sequence: int) -> list[int]:
        if kind in _TEXT_KINDS:
            return text_prompt(self._text, context, sequence)
        return synthetic_prompt(context, sequence)

    def _first(self, prompt: list[int], table: range) -> int:
        """Compute a prompt; return the first token of its answer."""
        sample = SampleInput(_GREEDY, 0, prompt, [])
        (drawn,) = self._runner.execute(batch_of([ScheduledSequence(0, prompt, 0, table, sample)]))
        assert drawn is not None
        return drawn.token_ids[0]


class _Decoding:
    """Sequences that decode, in seats as a node's scheduler keeps them."""

    def __init__(
        self,
        prompts: Sequence[list[int]],
        first_tokens: Sequence[int],
        tables: Sequence[range],
        params: SamplingParams,
    ) -> None:
        num_tokens = len(prompts[0]) + DECODE_STEPS + 1
        self._seats = seats = Seats(len(prompts), num_tokens, len(tables[0]))
        self._rows = np.arange(len(prompts))
        for row, (prompt, token, table) in enumerate(
            zip(prompts, first_tokens, tables, strict=True)
        ):
            seats.token_ids[row, : len(prompt) + 1] = [*prompt, token]
            seats.num_prompt[row], seats.num_known[row] = len(prompt), len(prompt) + 1
            seats.block_tables[row], seats.num_blocks[row] = table, len(table)
            seats.set_params(row, params)

    def batch(self) -> StepBatch:
        """Return the next step."""
        ones = np.ones(len(self._rows), np.int64)
        return StepBatch(
            self._seats,
            self._rows,
            self._seats.num_known - 1,
            ones,
            np.zeros_like(ones),
            ones.astype(np.bool_),
            _not_looked_at,
        )

    def append(self, drawn: Sequence[DrawnTokens | None]) -> None:
        """Append what the step drew."""
        token_ids = [entry.token_ids[0] for entry in drawn if entry is not None]
        self._seats.append_one_each(
            self._rows, self._seats.num_known.copy(), np.array(token_ids, np.int64)
        )


def _not_looked_at(entry: int) -> ScheduledSequence:
    raise AssertionError(f"entry {entry} is looked at as an object, which a plain step is not")


class Peer:
    """Another engine in a process of its own, run by `script`; it sleeps between requests."""

    def __init__(self, script: str, python: str, folder: Path, num_threads: int) -> None:
        self._script = Path(__file__).with_name(script)
        # Chosen for this engine's kernels; the other engine has its own.
        ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
        environment = {k: v for k, v in os.environ.items() if k not in ours}
        self._process = subprocess.Popen(
            [python, str(self._script), str(folder), str(num_threads), str(DECODE_STEPS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._ask("ready")

    def _ask(self, question: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait(timeout=_PEER_START_S)
            sys.exit(
                f"{self._script.name} ended with exit code {code}: has --peer-python its packages?"
            )
        return float(answer)

    def measure(self, kind: str, num_sequences: int, context: int) -> float:
        return self._ask(f"{kind} {num_sequences} {context}")

    def rss_mb(self) -> float:
        return self._ask("rss")

    def kv_mb(self) -> float:
        return self._ask("kv")

    def close(self) -> None:
        self._process.communicate(timeout=60)


def run(measures: dict[str, Measure], rounds: int) -> dict[str, dict[str, float]]:
    """Return medians per name in `measures` and figure; each round asks every name in turn."""
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in measures}
    for round_index in range(rounds + 1):
        for kind, num_sequences, context in MEASURES:
            for name, measure in measures.items():
                if name != "pdserve" and kind not in _PEER_KINDS:
                    continue
                value = measure(kind, num_sequences, context)
                if round_index > 0:  # the first round touches all memory and is not counted
                    key = key_of(kind, num_sequences, context)
                    figures[name].setdefault(key, []).append(value)
    return {
        name: {key: round(statistics.median(values), 1) for key, values in by_key.items()}
        for name, by_key in figures.items()
    }


def peak_rss_mib() -> float:
    """Return the most memory this process had. `getrusage` would count its parent's before exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine", description="Speed of one engine, and of another."
    )
    parser.add_argument("--model", default="demo", help="a Hugging Face folder or .gguf file")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of every measure")
    parser.add_argument("--num-threads", type=int, default=0, help="CPU threads (0: all cores)")
    parser.add_argument("--peer", choices=list(_PEERS), help="measure this too, in turns")
    parser.add_argument("--peer-python", default=sys.executable, help="a Python with its packages")
    parser.add_argument(
        "--activation-dtype", choices=["auto", "float32", "int8"], default="auto",
        help="what products with quantised weights compute in",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache-dtype", choices=["auto", "float32", "bfloat16", "int8"], default="auto",
        help="what the KV cache stores; llama.cpp stores float16",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON line last")
    arguments = parser.parse_args()
    folder = resolve_checkpoint(arguments.model)
    engine = EngineUnderTest(
        folder, arguments.num_threads, arguments.activation_dtype, arguments.kv_cache_dtype
    )
    measures: dict[str, Measure] = {"pdserve": engine.measure}
    peer = None
    if arguments.peer:
        script = _PEERS[arguments.peer]
        peer = Peer(script, arguments.peer_python, folder, arguments.num_threads)
        measures[arguments.peer] = peer.measure
    figures = run(measures, arguments.rounds)
    rss_mb = peak_rss_mib()
    result: dict[str, object] = {
        **figures["pdserve"],
        "rss_mb": round(rss_mb),
        "kv_mb": round(engine.kv_mb),
    }
    if peer is not None:
        by_peer = {**figures[arguments.peer], "rss_mb": round(peer.rss_mb())}
        if arguments.peer == "llama.cpp":
            by_peer["kv_mb"] = round(peer.kv_mb())
        result["peer"] = by_peer
        peer.close()
    result["one_row"] = engine.one_row_parts()
    if arguments.json:
        print(json.dumps(result))
        return
    for key, value in figures["pdserve"].items():
        others = [
            f"   {name} {by_key[key]:8.1f}" for name, by_key in figures.items() if key in by_key
        ]
        print(f"{key:24}{''.join(others)}" if peer is not None else f"{key:24} {value:8.1f}")


if __name__ == "__main__":
    main()
