"""The back end `triton` on NVIDIA GPUs: Triton kernels and the driver, neither Paddle nor torch.

    back_end      what this package is to the runner
    compiling     kernels compiled in several processes
    card          the card that a node computes on
    decoder       a decoder's three parts, as launches; decoding steps are graphs
    drawing/      draws, but for what only the host can decide
    cache/        the KV cache on the card, and its way to host memory
    steps/        how a step's rows lie on the card
    load_weights  a folder's weights onto the card
    weight_plan   in which form a product has its weights, by what the files have
    repacking     quantised weights as kernels read them
    launches      a layer's kernels, with their arguments in place
    tiles         which tile a product takes; it never enters the bits
    weights       a decoder's weights on the card; random ones, for measurements
    kernels/      products, attention, rows, the draw
    launcher      compiles a kernel and launches it through the driver
    tensor_map    matrices as the copy engine wants them described
    cuda_driver   the driver's calls: memory, streams, events, graphs
    shareable     memory that other processes map

The page docs/gpu.md says how sums are ordered, and what was measured. Its modules import `triton`,
which is an extra.

Decisions:

The GPU kernels never divide a sum by the number of rows. They compute `W @ x.T`, so weights lie on
the matrix unit's long side, and one program adds all inputs of its tile in one chain of matrix
instructions; attention is merged from pieces at fixed positions. So a row's bits depend neither on
the tile nor on the other rows, which an H100 showed for every tile and step that was tried. Ranges
of inputs in programs of their own, added in order by the next kernel, would take 3.5 % off the
products of one row and cost a second sum in prefill. `docs/gpu.md` has the figures.

The driver is called through ctypes. One file serves every version of it, where `cuda-bindings`
follows CUDA's major versions and costs more a call.

A step's tokens stay on the card, and the embedding of the next one reads them there. The host sends
all other numbers of a row again, in one copy of a few KB; a kernel that moves rows on would need no
copy. But so rows may leave, change their order and get blocks, and a step that is begun early is
like any other. The scheduler decides which one is, since a runner knows neither queue nor pool.

The card draws whatever a row asks for, with noise of the CPU's Philox words: two launches and four
bytes a row for a temperature, and more launches where rows of the step ask for more. On the host
are drawn rows of which filters keep more tokens than a list has room for, rows whose last kept
token would depend on the order in which weights are added, and rows that have no allowed token. A
row's way depends on its own request and logits alone, and filters, penalties and biases are the
host's to the bit, so a request has the same tokens in every batch and either way.

Rows under grammars have their masks before the draw, where a CPU asks the grammar about the token
that was drawn without one. Masks are filled while the graph runs, and one is 19 KB; logits would be
600 KB a row to the host, and the step behind could not be queued before they are there. Rows could
also be left out of every second step, so that the others go on: then they would be half as fast,
for a twentieth that the others gain.

The tokens that penalties look at are sent with each step, not counted on the card. A table of
counts takes 0.6 MB a seat at 152,000 tokens, has to follow every seat that changes hands, and would
need a second one for the drafts of a step; sent are 4 bytes for each token before the row.

A cache in int8 has the CPU's bytes and scales, but all bytes of a block come before its scales, in
words of 16 bits for two numbers that are operands of different instructions. In the CPU's places a
token of 128 numbers takes 132 bytes, which no wide load reads, and operands read in bytes would
have other bits in `mma.sync` than in `wgmma`.
"""
