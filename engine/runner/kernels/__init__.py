"""CPU kernels in numba. A row's result does not depend on the rest of the batch, to the last bit.

The products in `panel_product` and `tile_product` share one idea: a few rows times vectors of
sixteen columns, every element one chain of fused multiply-adds in the order of the inner index. The
number of rows and columns in a tile, the thread that computes it and the width of the machine's
vectors change nothing in a chain. So results are equal to the last bit however prompts are chunked
and requests are batched.

    matmul          products on packed weights: panel_product and tile_product under it
    attention       paged attention with an online softmax
    attention_plan  the work items of a step's attention
    kv_slots        a token's key or value in the KV cache: float32, bfloat16 or int8
    rotary          head norms, rotary positions, writing the KV cache
    layer           a whole decoder layer out of these, in few entries into the thread pool
    sample_rows     draws from rows of logits; filters: top-k, top-p, min-p; draw: the draw itself
    withhold        takes tokens that grammars do not allow out of rows of logits
    row_scan        the largest logits of a row by block, and masks of the tokens near them
    weights         e^-depth of many tokens; philox: the noise of the draws
    team            phases that a few threads share
    vector_ir, vector_math   LLVM's own vectors, and functions on them

Compiled code is cached in a folder named after these sources: numba itself only checks the file of
the function that it caches, not the files of the functions that this one calls.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numba


def _cache_folder() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    environment = os.environ
    ours = environment.get("PDSERVE_CACHE") or (
        f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/pdserve"
    )
    base = environment.get("NUMBA_CACHE_DIR") or f"{ours}/numba"
    return str(Path(base).expanduser() / digest.hexdigest()[:16])


numba.config.CACHE_DIR = _cache_folder()  # read when the kernels below are decorated
