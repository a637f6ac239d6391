"""A decoder layer, and a layer that drafts, out of the kernels: few calls into compiled code."""

from __future__ import annotations

from numba import njit

from engine.runner.kernels.attention import paged_attention
from engine.runner.kernels.matmul import gated_linear, gather_columns, linear, rms_norm
from engine.runner.kernels.rotary import rotate_and_store


@njit(nogil=True, cache=True, error_model="numpy")
def project_and_store(  # type: ignore[no-untyped-def]
    hidden, norm, epsilon, qkv_panels, qkv_bias, head_norms, cosines, sines, scale, keys, values,
    positions, slots, normed, qkv, num_threads,
) -> None:  # fmt: skip
    """`qkv = rotary(qkv(norm(hidden)))`, keys and values into the cache."""
    rows = hidden.shape[0]
    head_dim = keys.shape[3]
    rms_norm(hidden, norm, epsilon, normed)
    linear(normed, qkv_panels, qkv_bias, hidden[:0], qkv, num_threads)
    heads = qkv.reshape((rows, qkv.shape[1] // head_dim, head_dim))
    rotate_and_store(
        heads, head_norms, epsilon, cosines, sines, positions, scale, slots, keys, values
    )


@njit(nogil=True, cache=True, error_model="numpy")
def attend_and_add(  # type: ignore[no-untyped-def]
    hidden, qkv, output_panels, output_bias, keys, values, positions, block_tables, items, attended,
    num_threads,
) -> None:  # fmt: skip
    """`hidden += output(attention(qkv))`."""
    rows = hidden.shape[0]
    head_dim = keys.shape[3]
    heads = qkv.reshape((rows, qkv.shape[1] // head_dim, head_dim))
    out = attended.reshape((rows, attended.shape[1] // head_dim, head_dim))
    paged_attention(heads, keys, values, block_tables, positions, items, out, num_threads)
    linear(attended, output_panels, output_bias, hidden, hidden, num_threads)


@njit(nogil=True, cache=True, error_model="numpy")
def mlp_half(  # type: ignore[no-untyped-def]
    hidden, norm, epsilon, gate_up_panels, gate_up_bias, down_panels, down_bias, normed, gated,
    num_threads,
) -> None:  # fmt: skip
    """`hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))`."""
    rms_norm(hidden, norm, epsilon, normed)
    gated_linear(normed, gate_up_panels, gate_up_bias, gated, num_threads)
    linear(gated, down_panels, down_bias, hidden, hidden, num_threads)


@njit(nogil=True, cache=True, error_model="numpy")
def whole_layer(  # type: ignore[no-untyped-def]
    hidden, input_norm, qkv_panels, qkv_bias, head_norms, output_panels, output_bias, mlp_norm,
    gate_up_panels, gate_up_bias, down_panels, down_bias, keys, values, epsilon, cosines, sines,
    scale, positions, slots, block_tables, items, normed, qkv, attended, gated, num_threads,
) -> None:  # fmt: skip
    """All of a layer in one call: crossing into compiled code costs as much as a small kernel."""
    project_and_store(
        hidden, input_norm, epsilon, qkv_panels, qkv_bias, head_norms, cosines, sines, scale, keys,
        values, positions, slots, normed, qkv, num_threads,
    )  # fmt: skip
    attend_and_add(
        hidden, qkv, output_panels, output_bias, keys, values, positions, block_tables, items,
        attended, num_threads,
    )  # fmt: skip
    mlp_half(
        hidden, mlp_norm, epsilon, gate_up_panels, gate_up_bias, down_panels, down_bias, normed,
        gated, num_threads,
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def enter_mtp(  # type: ignore[no-untyped-def]
    token_ids, embedding, embedding_norm, states, hidden_norm, epsilon, token_panels, hidden_panels,
    projection_bias, input_norm, qkv_panels, qkv_bias, head_norms, cosines, sines, scale, keys,
    values, positions, slots, inputs, normed, qkv, num_threads,
) -> None:  # fmt: skip
    """`inputs` from tokens and `states`, their keys and values into the cache, and `qkv`."""
    gather_columns(embedding, token_ids, inputs)
    rms_norm(inputs, embedding_norm, epsilon, normed)
    linear(normed, token_panels, projection_bias, inputs[:0], inputs, num_threads)
    rms_norm(states, hidden_norm, epsilon, normed)
    linear(normed, hidden_panels, projection_bias[:0], inputs, inputs, num_threads)
    project_and_store(
        inputs, input_norm, epsilon, qkv_panels, qkv_bias, head_norms, cosines, sines, scale, keys,
        values, positions, slots, normed, qkv, num_threads,
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def leave_mtp(  # type: ignore[no-untyped-def]
    outputs, qkv, output_panels, output_bias, keys, values, positions, block_tables, items, epsilon,
    mlp_norm, gate_up_panels, gate_up_bias, down_panels, down_bias, output_norm, head, attended,
    gated, normed, logits, num_threads,
) -> None:  # fmt: skip
    """The rest of the layer over `outputs` in place; `normed` is what the head saw."""
    attend_and_add(
        outputs, qkv, output_panels, output_bias, keys, values, positions, block_tables, items,
        attended, num_threads,
    )  # fmt: skip
    mlp_half(
        outputs, mlp_norm, epsilon, gate_up_panels, gate_up_bias, down_panels, down_bias, normed,
        gated, num_threads,
    )  # fmt: skip
    rms_norm(outputs, output_norm, epsilon, normed)
    linear(normed, head, output_bias[:0], outputs[:0], logits, num_threads)
