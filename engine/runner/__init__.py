"""Executing planned steps on a real model: the only package that imports Paddle and numba.

One decoder, described by `model_spec.DecoderSpec` and read from a Hugging Face folder by
`checkpoint`, runs on one of two computations with the same three parts (`decoder.Decoder`):

    numba_decoder    CPU, float32. Kernels of `kernels/` on the cache's own memory. A row's result
                     depends on its own tokens alone, to the last bit.
    paddle_decoder   any device. Plain Paddle operators, with attention either in plain operators
                     too (`paddle_attention`, the reference) or fused (`fused_attention`, GPU).

Beside either, `mtp` drafts tokens with one more layer. `verification` draws a step's tokens and
accepts the drafts that come true; `host_pool` keeps blocks that were swapped out.

`load.load_model_runner` chooses, loads and returns a `model_runner.ModelRunner`. This file imports
nothing, because the environment of Paddle's math libraries is set before Paddle is imported.
"""
