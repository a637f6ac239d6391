"""The back end `triton` on NVIDIA GPUs: Triton kernels and the driver, neither Paddle nor torch.

    back_end      what this package is to the runner
    compiling     kernels compiled in several processes
    card          the card that a node computes on
    decoder       a decoder's three parts, as launches; decoding steps are graphs
    card_draw     draws where a temperature is all that a row asks for
    cache/        the KV cache on the card, and its way to host memory
    steps/        how a step's rows lie on the card
    load_weights  a folder's weights onto the card
    launches      a layer's kernels, with their arguments in place
    tiles         which tile a product takes; it never enters the bits
    weights       a decoder's weights on the card; random ones, for measurements
    kernels/      products, attention, rows, the draw
    launcher      compiles a kernel and launches it through the driver
    tensor_map    matrices as the copy engine wants them described
    cuda_driver   the driver's calls: memory, streams, events, graphs, memory between processes

The page docs/gpu.md says how sums are ordered, and what was measured. Its modules import `triton`,
which is an extra.
"""
