"""llama.cpp's logits of texts: `python -m bench.engine.llama_cpp_logits GGUF THREADS OUT < …`.

Reads windows of token ids as JSON, all of one length, and writes float32 logits
`[windows, tokens, vocabulary]` to OUT. Needs llama-cpp-python and numpy alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import llama_cpp
import numpy as np

from bench.engine.llama_cpp_peer import Engine


def main() -> None:
    path, num_threads, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    texts = json.load(sys.stdin)
    engine = Engine(path, num_threads or os.cpu_count() or 1)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(engine.model))
    shape = (len(texts), len(texts[0]), vocabulary)
    found = np.lib.format.open_memmap(out, "w+", np.float32, shape)
    for number, text in enumerate(texts):
        engine.clear()
        engine.compute([(token, i, 0, True) for i, token in enumerate(text)])
        found[number] = engine.logits(len(text), vocabulary)
    found.flush()


if __name__ == "__main__":
    main()
