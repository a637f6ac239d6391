"""CPU kernels in numba. A row's result does not depend on the rest of the batch, to the last bit.

The products share one idea: a few rows times vectors of sixteen columns, every element one chain
of fused multiply-adds in a fixed order: of the inner index, or with int8 activations of the blocks,
whose integer products are exact. The number of rows and columns in a tile, the thread that computes
it and the width of the machine's vectors change nothing in a chain. So results are equal to the
last bit however prompts are chunked and requests are batched.

    products/       rows times stored weights
    sampling/       draws from rows of logits
    norms           norms of rows, and rows in int8 for a team
    attention       paged attention with an online softmax
    attention_plan  the work items of a step's attention
    plain_rows      a step of plain decodes, laid out in one call
    kv_slots        a token's key or value in the KV cache: float32, bfloat16 or int8
    rotary          head norms, rotary positions, writing the KV cache
    layer           a whole decoder layer out of these, in few entries into the thread pool
    lock            held around them
    team            phases that a few threads share
    compiled        functions that are called by address
    vector_ir, vector_math   LLVM's own vectors, and functions on them

Compiled code is cached in a folder named after these sources: numba itself only checks the file of
the function that it caches, not the files of the functions that this one calls. A folder into which
another user could put code is not used.
"""

from __future__ import annotations

import os
from pathlib import Path

import numba

from common.files.code_cache import code_cache_folder

# Read when the kernels below are decorated.
numba.config.CACHE_DIR = code_cache_folder(Path(__file__).parent)

# Read when the thread pool's library is loaded. By default its idle threads keep their processors
# busy for milliseconds. Where other processes compute too, those that have work then wait for them.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    # GNU's library: about as long as it takes from one layer to the next.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
