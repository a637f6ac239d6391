"""The back end `triton` on NVIDIA GPUs: Triton kernels and the driver, neither Paddle nor torch.

    back_end      the interface of this package to the runner
    compiling     kernels compiled in several processes
    card          the card that a node computes on
    decoder       a decoder's three parts, as launches; decoding steps are graphs
    drawing/      draws, except those that only the host can decide
    cache/        the KV cache on the card, and its way to host memory
    steps/        how a step's rows lie on the card
    experts/      the launches and the tiles of mixtures of experts
    load_weights  a folder's weights onto the card
    weight_plan   in which form a product has its weights, by what the files have
    repacking     quantised weights as kernels read them
    launches      a layer's kernels, with their arguments in place
    attention_launches  those of attention
    tiles         which tile a product takes; it never enters the bits
    weights       a decoder's weights on the card; random ones, for measurements
    kernels/      products, attention, rows, the draw
    launcher      compiles a kernel and launches it through the driver
    tensor_map    descriptions of matrices for the copy engine
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

Pieces are listed once for each window that layers have, and a list holds what is seen. With one
list for all layers, programs would find pieces before a window among their own and return early,
and some would have work while others had none: at 32,000 tokens and a window of 4,096 seven pieces
of eight are before it. Another list costs one launch a step.

The driver is called through ctypes. One file serves every version of it, where `cuda-bindings`
follows CUDA's major versions and costs more a call.

A step's tokens stay on the card, where the embedding of the next step reads them. The host sends
all other numbers of a row again, in one copy of a few KB. A kernel that advances the rows would
save this copy; with it, rows can leave, change their order and get blocks, and a step that is begun
early is like any other. The scheduler decides which step is begun early, since a runner knows
neither queue nor pool.

The card draws with noise from the CPU's Philox words: two launches and four bytes a row for a
temperature, and more launches for further settings of the step's rows. The host draws the rows of
which filters keep more tokens than a list has room for, the rows whose last kept token would depend
on the order in which weights are added, and the rows without an allowed token. Where a row is drawn
depends on its own request and logits alone, and filters, penalties and biases are the host's to the
bit, so a request has the same tokens in every batch, drawn on either side.

Rows under grammars have their masks before the draw; the CPU draws first, and then asks the grammar
about the token. Masks are filled while the graph runs, and one is 19 KB; logits would be 600 KB a
row to the host, and the next step could not be queued before they are there. Rows under grammars
could also be left out of every second step: they would be half as fast, and the other rows a
twentieth faster.

The tokens that penalties count are sent with each step, 4 bytes for each token before the row. A
table of counts on the card takes 0.6 MB a seat at 152,000 tokens, would have to be reset whenever a
seat changes its sequence, and needs a second one for the drafts of a step.

A cache in int8 has the CPU's bytes and scales, but all bytes of a block come before its scales, in
words of 16 bits for two numbers that are operands of different instructions. In the CPU's order a
token of 128 numbers takes 132 bytes, which no wide load reads, and operands read in bytes would
have other bits in `mma.sync` than in `wgmma`.
"""
