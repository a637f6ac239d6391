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

Decisions:

The GPU kernels never divide a sum by the number of rows. `engine/runner/gpu` computes `W @ x.T`, so
weights lie on the matrix unit's long side, and one program adds all inputs of its tile in one chain
of matrix instructions; attention is merged from pieces at fixed positions. So a row's bits depend
neither on the tile nor on the other rows, which an H100 showed for every tile and step that was
tried. Ranges of inputs in programs of their own, added in order by the next kernel, were the other
way: they would take 3.5 % off the products of one row and cost a second sum in prefill. The driver
is called through ctypes: one file of 350 lines serves every version of it, where `cuda-bindings`
follows CUDA's major versions and costs more a call. `docs/gpu.md` has the figures. No node uses
these kernels yet.
"""
