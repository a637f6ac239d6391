"""CPU kernels in numba. A row's result does not depend on the rest of the batch, to the last bit.

The products share one idea: a few rows times vectors of sixteen columns, every element one chain
of fused multiply-adds in a fixed order: of the inner index, or with int8 activations of the groups,
whose integer products are exact. The number of rows and columns in a tile, the thread that computes
it and the width of the machine's vectors change nothing in a chain. So results are equal to the
last bit however prompts are chunked and requests are batched.

    products/       rows times stored weights
    sampling/       draws from rows of logits
    norms           norms of rows, and rows in int8 for a team
    attention       paged attention with an online softmax
    attention_plan  the work items of a step's attention
    step_rows       a step's rows and its draws, laid out in one call each
    kv_slots        a token's key or value in the KV cache: float32, bfloat16 or int8
    rotary          head norms, rotary positions, writing the KV cache
    experts         a mixture of experts: which a row is sent to, and their products
    layer           a whole decoder layer out of these, in few entries into the thread pool
    lock            held around them
    team            phases that a few threads share
    compiled        functions that are called by address
    vector_ir, vector_math   LLVM's own vectors, and functions on them

Compiled code is cached in a folder named after these sources: numba itself only checks the file of
the function that it caches, not the files of the functions that this one calls. A folder into which
another user could put code is not used.

Decisions:

The thread pool is entered by one small loop that calls a function by its address
(`kernels/team.py`). numba compiles the body of a `prange` loop three times: in the function, as a
kernel and in the kernel's wrapper. With a layer as the body this takes longer than all other
compilation. Processes that start together divide what is to be compiled (`common_kernels`,
`compile_once`): one begins with a layer, whose attention comes last, the other with attention, then
the draws. Afterwards they measure what steps cost one after the other, because two nodes with a
thread per core each would measure each other.

Idle threads of the pool sleep soon (`OMP_WAIT_POLICY=passive` and `GOMP_SPINCOUNT=1000`, unless the
policy is set). By default an idle thread of GNU's OpenMP reads a variable for milliseconds before
it sleeps. Alone on a machine that costs nothing. With a second node on the same cores each step
waited, at the end of each layer, for threads that the system had taken off the processor for
another node's idle ones: a step of 5 ms takes 16 to 216 ms with the library's default and 9 ms with
these (`docs/figures.md`, two engines on the same cores). The thousand reads take about as long as
Python takes from one layer to the next, so that a node alone does not sleep and wake between
layers.
"""

from __future__ import annotations

import os
from pathlib import Path

import numba
from numba.core import caching

from common.files.code_cache import keep_compiled
from common.request import GREEDY_BELOW

# Used when the kernels below are decorated. The number is compiled in.
numba.config.CACHE_DIR = keep_compiled(caching, Path(__file__).parent, GREEDY_BELOW)

# Read when the thread pool's library is loaded. By default its idle threads keep their processors
# busy for milliseconds. Where other processes compute too, those that have work then wait for them.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    # GNU's library: about as long as it takes from one layer to the next.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
