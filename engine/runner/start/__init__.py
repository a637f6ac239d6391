"""From a configuration to a runner: what is checked, chosen, measured and built at the start.

load            from a configuration to a runner
choose          which back end computes
assemble        from checked files and a back end to a runner
compile_progress  logs how far that is
profile_step    computes the largest step
cache_size      how many blocks the cache has

Decisions:

The KV cache is what the largest step leaves. `get_max_chunk_tokens` is the scheduler's budget, the
size of the step buffers, and the size of the step that is computed at the start to measure its
memory. The cache is allocated after that measurement, from the node's share of the device. One
layer is measured, because all layers use the same buffers. A decode node without local prefill
decodes in steps of all seats with all drafts and recomputes in chunks that fit, so that the rest is
KV.
"""
