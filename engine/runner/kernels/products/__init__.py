"""Products with packed weights of any stored format.

linear         products with packed weights, chosen by the address of their kernel
packed         stored weights as panels in one piece of memory
group_layout   a panel's bytes
panel_product  rows times panels of floats
group_product  rows times panels of groups, widened in registers
tile_product   two unpacked operands
byte_product   int8 rows times panels of groups
byte_dot       by which instruction
byte_lookup    bytes that four bits stand for
byte_rows      rows in int8
activations    what is computed of gate and up

Decisions:

The kernels are built around reading weights once per step. A step of few rows takes as long as
reading its weights from memory, and drafts pay because further rows share that reading. Weights
therefore lie in pages of 2 MiB, two panels are read at a time, and the next ones are prefetched
across page ends. Each row still has its own chain. A layer enters the thread pool once, and
counters distribute its phases: five entries per layer take a tenth of a step. No thread waits for
another that has not arrived; a single thread can do all shares.

Products with quantised weights are computed in integers, unless the configuration says otherwise.
With `--activation-dtype int8`, which `auto` chooses on the CPU kernels for weights in groups, each
row is quantised by itself in groups of 32, integer dot products are exact in any order, and groups
are combined in one fixed order; a row has the same bits in every batch. The instructions of AVX2,
AVX-512 VNNI and NEON give the same integers. The products for NEON (`sdot`) were compiled for
AArch64 and run in QEMU 7.2 only, every grouped format with one to three rows: the bits of the
reference (`tests/unit/engine/runner/kernels/products/test_neon.py`, which repeats it where QEMU and
a cross compiler are). No model was computed on such a processor, and nothing was timed there. The
rule for the default is the faster arithmetic whose perplexity is within 1 % of the other's: over
11,253 tokens it was 0.41 % ± 0.07 % above that of float32, and prompts are computed almost twice as
fast (`docs/figures.md`). `float32` widens weights in registers and has the answers of the
dequantised model; with it they are compared with those of transformers. The fingerprint names the
arithmetic.

Rows in int8 have a step for 16 values where that changes logits most. A few channels of
activations are many times larger than the rest (40 times the median before the head of the demo
model), and values that share a step with one lose bits. For queries, keys, values and logits each
half of a group of 32 has its own step; for the other products both halves have the same one, as
weights and llama.cpp do. The divergence from float32 is lower by three tenths. A step for each half
everywhere would halve it, but costs one more multiplication per group and row, 8 % of the products.
"""
