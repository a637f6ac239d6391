"""transformers on PyTorch, driven line by line: `python transformers_peer.py FOLDER THREADS STEPS`.

Reads `ready`, `rss`, or `KIND SEQUENCES CONTEXT` from standard input and answers each with one
number. Needs only torch and transformers (and gguf for a GGUF file), so any interpreter that has
them will do.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM


def prompts(num_sequences: int, context: int) -> torch.Tensor:
    """Return token ids `[num_sequences, context]`, those of `bench.engine.synthetic_prompt`."""
    rows = [
        [(7919 * (i + 1) + 104729 * sequence) % 30000 + 3 for i in range(context)]
        for sequence in range(num_sequences)
    ]
    return torch.tensor(rows)


def measure(
    model: torch.nn.Module, kind: str, num_sequences: int, context: int, steps: int
) -> float:
    """Return tokens per second of a prompt, or of the median step of greedy decoding."""
    token_ids = prompts(num_sequences, context)
    spans_s = []
    with torch.inference_mode():
        started_s = time.perf_counter()
        out = model(token_ids, use_cache=True, logits_to_keep=1)
        tokens = out.logits[:, -1].argmax(-1, keepdim=True)
        if kind == "prefill":
            return context / (time.perf_counter() - started_s)
        for _ in range(steps):
            started_s = time.perf_counter()
            cache = out.past_key_values
            out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)
            spans_s.append(time.perf_counter() - started_s)
    return num_sequences / statistics.median(spans_s)


def weights_in(folder: str) -> dict[str, str]:
    """Return what tells transformers that the folder's weights are in a GGUF file, if they are."""
    return {"gguf_file": "weights.gguf"} if Path(folder, "weights.gguf").exists() else {}


def peak_rss_mib() -> float:
    """Return the most memory this process had. `getrusage` would count its parent's before exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    folder, num_threads, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(num_threads or os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", **weights_in(folder)
    ).eval()
    for line in sys.stdin:
        if line.strip() == "ready":
            answer = 1.0
        elif line.strip() == "rss":
            answer = peak_rss_mib()
        else:
            kind, num_sequences, context = line.split()
            answer = measure(model, kind, int(num_sequences), int(context), steps)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
