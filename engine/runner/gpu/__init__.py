"""The decoder on an NVIDIA GPU: Triton kernels and the driver, without Paddle and without torch.

    cuda_driver   the driver's calls: memory, streams, events, graphs, memory between processes
    tensor_map    matrices as the copy engine wants them described
    launcher      compiles a kernel and launches it through the driver
    kernels/      products, attention, rows, the draw
    weights       a decoder's weights on the card; today random ones, of a model's shape
    tiles         which tile a product takes; it never enters the bits
    launches      a layer's kernels, with their arguments in place
    step_memory   the buffers of a step
    chunk_step    many rows of a few sequences: prefill
    decode_step   one row of many sequences, recorded as a graph

No node computes with it yet. The page docs/gpu.md says how sums are ordered, and what was measured.
Its modules import `triton`, which is an extra.
"""
