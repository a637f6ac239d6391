"""A decoder layer, and a drafting layer, made of the kernels: few entries into the thread pool.

Functions named `_members_…` are run by all members of a team at once; they call phases.
"""

from __future__ import annotations

from numba import njit

from engine.runner.kernels.attention import STATE_LANES, attention_phase, merge_phase
from engine.runner.kernels.norms import norm_phase, quantise_phase
from engine.runner.kernels.products.linear import gated_phase, gather_columns, is_fine, linear_phase
from engine.runner.kernels.rotary import rotary_phase
from engine.runner.kernels.team import new_progress, run_team

_PROJECT_PHASES, _ATTEND_PHASES, _MLP_PHASES = 3, 4, 4


@njit(nogil=True, cache=True, error_model="numpy")
def _project_and_store(  # type: ignore[no-untyped-def]
    progress, hidden, norm, epsilon, qkv_table, qkv_bias, head_norms, cosines, sines, scales,
    keys, values, positions, slots, normed, qkv, quantised, num_threads,
) -> None:  # fmt: skip
    """Compute `qkv = rotary(qkv(norm(hidden)))`, and write keys and values into the cache."""
    rows = hidden.shape[0]
    head_dim = 2 * cosines.shape[1]
    norm_phase(progress[0], hidden, norm, epsilon, normed, quantised, is_fine(qkv_table))
    linear_phase(
        progress[1], normed, qkv_table, qkv_bias, hidden[:0], quantised, qkv, num_threads
    )  # fmt: skip
    heads = qkv.reshape((rows, qkv.shape[1] // head_dim, head_dim))
    rotary_phase(
        progress[2], heads, head_norms, epsilon, cosines, sines, positions, scales, slots,
        keys, values,
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def _attend_and_add(  # type: ignore[no-untyped-def]
    progress, hidden, qkv, output_table, output_bias, keys, values, positions, block_tables,
    work, attended, quantised, num_threads,
) -> None:  # fmt: skip
    """Compute `hidden += output(attention(qkv))`.

    `work` has the items and merges of an `attention_plan.AttentionPlan`, and its `parts`.
    """
    rows = hidden.shape[0]
    items, merges, parts = work
    head_dim = parts.shape[1] - STATE_LANES
    heads = qkv.reshape((rows, qkv.shape[1] // head_dim, head_dim))
    out = attended.reshape((rows, attended.shape[1] // head_dim, head_dim))
    attention_phase(
        progress[0], heads, keys, values, block_tables, positions, items, parts, out
    )  # fmt: skip
    merge_phase(progress[1], positions, merges, parts, out)
    quantise_phase(progress[2], attended, quantised, is_fine(output_table))
    linear_phase(
        progress[3], attended, output_table, output_bias, hidden, quantised, hidden,
        num_threads,
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def _mlp_half(  # type: ignore[no-untyped-def]
    progress, hidden, norm, epsilon, gate_up_table, gate_up_bias, down_table, down_bias,
    normed, gated, quantised, num_threads,
) -> None:  # fmt: skip
    """Compute `hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))`."""
    norm_phase(progress[0], hidden, norm, epsilon, normed, quantised, is_fine(gate_up_table))
    gated_phase(
        progress[1], normed, gate_up_table, gate_up_bias, quantised, gated, num_threads
    )  # fmt: skip
    quantise_phase(progress[2], gated, quantised, is_fine(down_table))
    linear_phase(
        progress[3], gated, down_table, down_bias, hidden, quantised, hidden, num_threads
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def _members_of_layer(  # type: ignore[no-untyped-def]
    _member, progress, hidden, input_norm, qkv_table, qkv_bias, head_norms, output_table,
    output_bias, mlp_norm, gate_up_table, gate_up_bias, down_table, down_bias, keys, values,
    epsilon, cosines, sines, scales, positions, slots, block_tables, work, normed, qkv, attended,
    gated, quantised, num_threads,
) -> None:  # fmt: skip
    _project_and_store(
        progress, hidden, input_norm, epsilon, qkv_table, qkv_bias, head_norms, cosines,
        sines, scales, keys, values, positions, slots, normed, qkv, quantised, num_threads,
    )  # fmt: skip
    _attend_and_add(
        progress[_PROJECT_PHASES:], hidden, qkv, output_table, output_bias, keys, values,
        positions, block_tables, work, attended, quantised, num_threads,
    )  # fmt: skip
    _mlp_half(
        progress[_PROJECT_PHASES + _ATTEND_PHASES :], hidden, mlp_norm, epsilon, gate_up_table,
        gate_up_bias, down_table, down_bias, normed, gated, quantised, num_threads,
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def whole_layer(  # type: ignore[no-untyped-def]
    hidden, input_norm, qkv_table, qkv_bias, head_norms, output_table, output_bias, mlp_norm,
    gate_up_table, gate_up_bias, down_table, down_bias, keys, values, epsilon, cosines, sines,
    scales, positions, slots, block_tables, work, normed, qkv, attended, gated, quantised,
    num_threads,
) -> None:  # fmt: skip
    """Compute a layer in one call: entering compiled code costs as much as a small kernel.

    Weights are tables (`linear`). `quantised` is memory for rows in int8, two bytes for each of the
    most inputs of a product; empty, activations stay float32.
    """
    run_team(
        _members_of_layer, num_threads,
        (
            new_progress(_PROJECT_PHASES + _ATTEND_PHASES + _MLP_PHASES), hidden, input_norm,
            qkv_table, qkv_bias, head_norms, output_table, output_bias, mlp_norm, gate_up_table,
            gate_up_bias, down_table, down_bias, keys, values, epsilon, cosines, sines, scales,
            positions, slots, block_tables, work, normed, qkv, attended, gated, quantised,
            num_threads,
        ),
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def _members_entering(  # type: ignore[no-untyped-def]
    _member, progress, embedding_norm, states, hidden_norm, epsilon, token_table, hidden_table,
    projection_bias, input_norm, qkv_table, qkv_bias, head_norms, cosines, sines, scales, keys,
    values, positions, slots, inputs, normed, qkv, quantised, num_threads,
) -> None:  # fmt: skip
    norm_phase(
        progress[0], inputs, embedding_norm, epsilon, normed, quantised, is_fine(token_table)
    )
    linear_phase(
        progress[1], normed, token_table, projection_bias, inputs[:0], quantised, inputs,
        num_threads,
    )  # fmt: skip
    norm_phase(progress[2], states, hidden_norm, epsilon, normed, quantised, is_fine(hidden_table))
    linear_phase(
        progress[3], normed, hidden_table, projection_bias[:0], inputs, quantised,
        inputs, num_threads,
    )  # fmt: skip
    _project_and_store(
        progress[4:], inputs, input_norm, epsilon, qkv_table, qkv_bias, head_norms, cosines,
        sines, scales, keys, values, positions, slots, normed, qkv, quantised, num_threads,
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def enter_mtp(  # type: ignore[no-untyped-def]
    token_ids, embedding, embedding_norm, states, hidden_norm, epsilon, token_table, hidden_table,
    projection_bias, input_norm, qkv_table, qkv_bias, head_norms, cosines, sines, scales, keys,
    values, positions, slots, inputs, normed, qkv, quantised, num_threads,
) -> None:  # fmt: skip
    """Compute `inputs` from tokens and `states`, write their keys and values, and compute `qkv`.

    `quantised` is as in `whole_layer`.
    """
    gather_columns(embedding, token_ids, inputs)
    run_team(
        _members_entering, num_threads,
        (
            new_progress(4 + _PROJECT_PHASES), embedding_norm, states, hidden_norm, epsilon,
            token_table, hidden_table, projection_bias, input_norm, qkv_table, qkv_bias, head_norms,
            cosines, sines, scales, keys, values, positions, slots, inputs, normed, qkv, quantised,
            num_threads,
        ),
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def _members_leaving(  # type: ignore[no-untyped-def]
    _member, progress, outputs, qkv, output_table, output_bias, keys, values, positions,
    block_tables, work, epsilon, mlp_norm, gate_up_table, gate_up_bias, down_table, down_bias,
    output_norm, head, attended, gated, normed, quantised, logits, num_threads,
) -> None:  # fmt: skip
    _attend_and_add(
        progress, outputs, qkv, output_table, output_bias, keys, values, positions,
        block_tables, work, attended, quantised, num_threads,
    )  # fmt: skip
    _mlp_half(
        progress[_ATTEND_PHASES:], outputs, mlp_norm, epsilon, gate_up_table, gate_up_bias,
        down_table, down_bias, normed, gated, quantised, num_threads,
    )  # fmt: skip
    norm_phase(
        progress[_ATTEND_PHASES + _MLP_PHASES], outputs, output_norm, epsilon, normed,
        quantised, is_fine(head),
    )  # fmt: skip
    linear_phase(
        progress[_ATTEND_PHASES + _MLP_PHASES + 1], normed, head, output_bias[:0], outputs[:0],
        quantised, logits, num_threads,
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def leave_mtp(  # type: ignore[no-untyped-def]
    outputs, qkv, output_table, output_bias, keys, values, positions, block_tables, work, epsilon,
    mlp_norm, gate_up_table, gate_up_bias, down_table, down_bias, output_norm, head, attended,
    gated, normed, quantised, logits, num_threads,
) -> None:  # fmt: skip
    """Compute the rest of the layer over `outputs` in place; `normed` is the input of the head."""
    run_team(
        _members_leaving, num_threads,
        (
            new_progress(_ATTEND_PHASES + _MLP_PHASES + 2), outputs, qkv, output_table, output_bias,
            keys, values, positions, block_tables, work, epsilon, mlp_norm, gate_up_table,
            gate_up_bias, down_table, down_bias, output_norm, head, attended, gated, normed,
            quantised, logits, num_threads,
        ),
    )  # fmt: skip
