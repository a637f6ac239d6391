"""CPU kernels in numba. A row's result does not depend on the rest of the batch, to the last bit.

The products share one idea: a few rows times vectors of sixteen columns, every element one chain
of fused multiply-adds in a fixed order: of the inner index, or with int8 activations of the blocks,
whose integer products are exact. The number of rows and columns in a tile, the thread that computes
it and the width of the machine's vectors change nothing in a chain. So results are equal to the
last bit however prompts are chunked and requests are batched.

    linear          products with packed weights of any stored format, chosen by address (compiled)
    packed          stored weights as panels in one piece of memory; block_layout: a panel's bytes
    panel_product   rows times panels of floats; block_product: times panels of blocks, widened in
                    registers; tile_product: two unpacked operands
    byte_product    int8 rows times panels of blocks; byte_dot: by which instruction
    byte_rows       rows in int8; rows: norms, and that, for a team
    attention       paged attention with an online softmax
    attention_plan  the work items of a step's attention
    plain_rows      a step of plain decodes, laid out in one call
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

from common.cache_folder import cache_root, full_path


def _cache_folder() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    own = os.environ.get("NUMBA_CACHE_DIR")
    base = full_path(own) if own else cache_root() / "numba"
    return str(base / digest.hexdigest()[:16])


numba.config.CACHE_DIR = _cache_folder()  # read when the kernels below are decorated

# Read when the thread pool's library is loaded. By default its idle threads keep their processors
# busy for milliseconds. Where other processes compute too, those that have work then wait for them.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    # GNU's library: about as long as it takes from one layer to the next.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
