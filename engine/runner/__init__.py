"""Execution of planned steps on a real model: the only package that imports Paddle.

One decoder, described by `weights.spec.model_spec.DecoderSpec` and read from a folder by `weights`,
runs on one of the back ends, which are alike (`back_end.BackEnd`):

    cpu/      CPU, float32. A row's result depends on its own tokens alone, to the last bit.
    gpu/      NVIDIA GPUs, bfloat16. The same promise, with kernels in Triton.
    paddle/   any device. Plain Paddle operators, the reference.

The rooms, from the top down; imports go down only:

    start/         from a configuration to a runner
    model_runner   executes planned steps: tokens in, drawn tokens out, KV in the cache
    step_costs     measures at the start what steps cost on this machine
    cpu/, gpu/, paddle/  the back ends
    back_end       what a back end is
    drawing/       from logits to tokens
    mtp/           drafts tokens with one more layer
    kernels/       CPU kernels in numba
    cache/         the KV cache, its copies, swapped-out blocks
    weights/       the weights of a folder
    grammars/      the tokens that grammars allow

    decoder        the three parts of a back end's decoder
    flat_batch     a planned step as flat arrays
    memory_meter   how much memory there is, and how much of it was taken
    paddle_import  Paddle, imported once and in the right environment

`start.load.load_model_runner` chooses, loads and returns a `model_runner.ModelRunner`. This file
imports nothing, because the environment of Paddle's math libraries is set before Paddle is
imported.

Decisions:

Paddle is an extra of its own, `cpu` or `gpu`, because its two builds exclude each other. Neither
the router nor a node on the kernels needs it; a node whose back end is Paddle ends without it, with
an error that names both. Triton is the extra `triton`.
"""
