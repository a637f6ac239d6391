"""llama.cpp, driven line by line: `python llama_cpp_peer.py FOLDER THREADS STEPS`.

Reads `ready`, `rss`, `kv`, or `KIND SEQUENCES CONTEXT` from standard input and answers each with
one number. Needs only the package llama-cpp-python, so any interpreter that has it will do.
`FOLDER` has the file weights.gguf.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from pathlib import Path

import llama_cpp

_SILENT = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
_MOST_TOKENS = 32 * (256 + 64)
"""Tokens of all sequences of the largest measure, with its steps."""
_KV_ITEM_BYTES = 2
"""Bytes of a number in its KV cache, which is float16 by default."""


class Engine:
    """One context for up to 32 sequences."""

    def __init__(self, path: Path, num_threads: int) -> None:
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_SILENT, None)
        self.model = model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = _MOST_TOKENS
        parameters.n_batch, parameters.n_ubatch = 2048, 512
        parameters.n_seq_max = 32
        parameters.kv_unified = True
        parameters.n_threads = parameters.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)
        head_dim = llama_cpp.llama_model_n_embd(model) // llama_cpp.llama_model_n_head(model)
        heads = llama_cpp.llama_model_n_layer(model) * llama_cpp.llama_model_n_head_kv(model)
        self.kv_mib = 2 * heads * head_dim * _MOST_TOKENS * _KV_ITEM_BYTES / 2**20

    def clear(self) -> None:
        """Forget all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def compute(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Compute (token id, position, sequence, whether its logits are wanted) in one batch."""
        self._batch.n_tokens = len(tokens)
        for i, (token, position, sequence, has_logits) in enumerate(tokens):
            self._batch.token[i], self._batch.pos[i] = token, position
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, sequence
            self._batch.logits[i] = has_logits
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code != 0:
            sys.exit(f"llama_decode returned {code} for {len(tokens)} tokens")

    def logits(self, rows: int, vocabulary: int) -> ctypes.Array[ctypes.Array[ctypes.c_float]]:
        """Return the batch's logits `[rows, vocabulary]`, all of which were wanted, as ctypes."""
        found = llama_cpp.llama_get_logits(self._context)
        kind = ctypes.c_float * vocabulary * rows
        return kind.from_address(ctypes.addressof(found.contents))

    def best(self, index: int) -> int:
        """Return the likeliest token after the batch's token `index`, as greedy sampling does."""
        sampler = llama_cpp.llama_sampler_init_greedy()
        token = int(llama_cpp.llama_sampler_sample(sampler, self._context, index))
        llama_cpp.llama_sampler_free(sampler)
        return token


def prompt_of(sequence: int, length: int) -> list[int]:
    """Return the token ids of `bench.engine.synthetic_prompt`."""
    return [(7919 * (i + 1) + 104729 * sequence) % 30000 + 3 for i in range(length)]


def measure(engine: Engine, kind: str, num_sequences: int, context: int, steps: int) -> float:
    """Return tokens per second of a prompt, or of the median step of greedy decoding."""
    engine.clear()
    last = []
    started_s = time.perf_counter()
    for sequence in range(num_sequences):
        prompt = prompt_of(sequence, context)
        engine.compute([(t, i, sequence, i == context - 1) for i, t in enumerate(prompt)])
        last.append(engine.best(context - 1))
    if kind == "prefill":
        return context / (time.perf_counter() - started_s)
    spans_s = []
    for step in range(steps):
        started_s = time.perf_counter()
        engine.compute([(token, context + step, s, True) for s, token in enumerate(last)])
        last = [engine.best(index) for index in range(num_sequences)]
        spans_s.append(time.perf_counter() - started_s)
    return num_sequences / statistics.median(spans_s)


def peak_rss_mib() -> float:
    """Return the most memory this process had. `getrusage` would count its parent's before exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    folder, num_threads, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    engine = Engine(Path(folder, "weights.gguf"), num_threads or os.cpu_count() or 1)
    for line in sys.stdin:
        if line.strip() == "ready":
            answer = 1.0
        elif line.strip() == "rss":
            answer = peak_rss_mib()
        elif line.strip() == "kv":
            answer = engine.kv_mib
        else:
            kind, num_sequences, context = line.split()
            answer = measure(engine, kind, int(num_sequences), int(context), steps)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
