"""Execution of planned steps on a real model: the only package that imports Paddle and numba.

One decoder, described by `model_spec.DecoderSpec` and read from a Hugging Face folder by
`checkpoint`, runs on one of two computations with the same three parts (`decoder.Decoder`):

    numba_decoder    CPU, float32. Kernels of `kernels/` on the cache's own memory. A row's result
                     depends on its own tokens alone, to the last bit.
    paddle_decoder   any device. Plain Paddle operators, with attention either in plain operators
                     too (`paddle_attention`, the reference) or fused (`fused_attention`, GPU).
                     `tiled_attention` is the plain one, planned by `attention_tiles`; `fused_check`
                     refuses fused operators that differ from it.

With either, `mtp` drafts tokens with one more layer.

    load, assemble      from a configuration to a runner; from a checked checkpoint to its parts
    arithmetic          what products are computed in, for the fingerprint
    cache_size          how many blocks the cache has
    profile_step        computes the largest step; memory_meter: the memory that it takes
    model_runner        executes planned steps: tokens in, drawn tokens out, KV in the cache
    common_kernels      compiles the kernels that every model needs, divided among the nodes of a
                        machine (compile_once); compile_progress logs how far that is
    step_costs          measures at the start what steps cost on this machine
    flat_batch          a planned step as flat arrays
    step_buffers        the arrays of a step, allocated once for the largest one
    key_scales          powers of two that make channels of keys about equally large
    kv_cache            the KV cache in one allocation; kv_formats: what it stores of a number
    device_arrays       a step's index arrays, sent to the device in one copy
    layers_out          reports a step's layers as they become readable
    device_copies       copies KV between a device and host memory beside running steps
    host_pool           swapped-out blocks in host memory
    verification        accepts drafts from what was drawn after each row
    undrawn             why a sequence of a step has no token
    host_draw           draws from logits on the host
    device_draw         draws with one read from a device: device_sampler finds the tokens that can
                        be drawn (device_noise: their noise), head_draw draws from them exactly
    grammar_masks       which tokens grammars allow, found while the layers compute
    preparation         compiles grammars before their requests get a seat
    held_matcher        the matcher of a seat, which follows its output
    unmasked_rows       rows that are drawn without a mask and then checked
    allowed_tokens      masks of allowed tokens
    token_rules         biases, bad words and allowed tokens, row by row
    prompt_scores       how likely a prompt's own tokens were
    sampler             from logits to tokens, all rows at once
    checkpoint          the weights of a folder, checked before any is read: safetensors, or
                        gguf_weights (gguf_file); quantised_source quantises them while loading
    tensor_source       what both have in common: block_tensor, a weight as stored, and
                        block_formats, its values
    packed_weights      weights for the CPU kernels, in a mapped file that nodes share
    cpu_settings        what a machine without a GPU refuses, checked first
    compile_once        kernels are compiled by one process of a machine; library_pages: LLVM's
                        pages are returned afterwards
    model_spec          the parameters of a decoder; decoder: its three parts
    numba_layer         a layer's weights for the CPU kernels; weight_memory: private memory
    rope                angles of rotary positions
    kernels/            CPU kernels in numba
    mtp/                the drafting layer
    gpu/                a decoder in Triton kernels for NVIDIA GPUs, which no node uses yet
    framework           Paddle, imported once and in the right environment

`load.load_model_runner` chooses, loads and returns a `model_runner.ModelRunner`. This file imports
nothing, because the environment of Paddle's math libraries is set before Paddle is imported.
"""
