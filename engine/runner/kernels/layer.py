"""A decoder layer, and a drafting layer, made of the kernels: few entries into the thread pool.

Functions named `_members_…` are run by all members of a team at once; they call phases. A *table*
is a packed weight as the products read it (`products.linear`).

What is called from outside takes named tuples as plain ones, `tuple(named)`, and names their fields
itself: with named ones each call takes microseconds longer, in which numba finds out their types.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from engine.runner.kernels.attention import STATE_LANES, attention_phase, merge_phase
from engine.runner.kernels.experts import (
    ExpertBuffers,
    ExpertTables,
    choice_phase,
    expert_down_phase,
    expert_gated_phase,
    order_phase,
)
from engine.runner.kernels.norms import add_norm_phase, norm_phase, quantise_phase
from engine.runner.kernels.products.linear import gated_phase, gather_columns, is_fine, linear_phase
from engine.runner.kernels.rotary import rotary_phase
from engine.runner.kernels.team import new_progress, run_team

Plain = tuple[Any, ...]
"""One of the named tuples below, as a plain one."""

_PROJECT_PHASES, _ATTEND_PHASES, _MLP_PHASES, _EXPERT_PHASES = 3, 5, 5, 7


class LayerTables(NamedTuple):
    """A layer's weights: norms, biases, key scales and tables; empty where a family has none.

    `scales` and `head_norms` are as in `rotary_phase`, `sinks` as in `attention_phase`.
    `attended_norm` and `mlp_output_norm` are those of what attention and MLP add to the hidden
    states. In a layer with experts (`ExpertTables`) `gate_up` and `down` are the shared MLP.
    """

    input_norm: np.ndarray
    qkv: np.ndarray
    qkv_bias: np.ndarray
    head_norms: np.ndarray
    scales: np.ndarray
    sinks: np.ndarray
    output: np.ndarray
    output_bias: np.ndarray
    attended_norm: np.ndarray
    mlp_norm: np.ndarray
    gate_up: np.ndarray
    gate_up_bias: np.ndarray
    down: np.ndarray
    down_bias: np.ndarray
    mlp_output_norm: np.ndarray


class LayerConstants(NamedTuple):
    """What is the same for all steps, and for all layers of one window; see `rotary_phase`.

    `activation` is as in `products.linear.gated_linear`, of all MLPs but experts.
    """

    epsilon: np.float32
    activation: int
    cosines: np.ndarray
    sines: np.ndarray
    num_threads: int


class LayerCache(NamedTuple):
    """The keys and values of a layer, as bytes: see `attention_phase`."""

    keys: np.ndarray
    values: np.ndarray


class Attended(NamedTuple):
    """A step's attention in the layers of one window, by an `attention_plan.AttentionPlan`."""

    positions: np.ndarray
    block_tables: np.ndarray
    window: int
    items: np.ndarray
    merges: np.ndarray
    parts: np.ndarray


class LayerBuffers(NamedTuple):
    """Memory of a step, `[rows, …]` each.

    `quantised` is for rows in int8, two bytes for each of the most inputs of a product; empty,
    activations stay float32.
    """

    normed: np.ndarray
    qkv: np.ndarray
    attended: np.ndarray
    gated: np.ndarray
    quantised: np.ndarray


class MtpEntry(NamedTuple):
    """What a drafting layer has before its layer: two norms, two projections and their bias."""

    embedding_norm: np.ndarray
    hidden_norm: np.ndarray
    token: np.ndarray
    hidden: np.ndarray
    bias: np.ndarray


@njit(nogil=True, cache=True, error_model="numpy")
def _project_and_store(  # type: ignore[no-untyped-def]
    progress, hidden, layer, model, cache, positions, slots, buffers
) -> None:
    """Compute `qkv = rotary(qkv(norm(hidden)))`, and write keys and values into the cache."""
    normed, qkv, quantised = buffers.normed, buffers.qkv, buffers.quantised
    rows = hidden.shape[0]
    head_dim = 2 * model.cosines.shape[1]
    is_fine_qkv = is_fine(layer.qkv)
    norm_phase(progress[0], hidden, layer.input_norm, model.epsilon, normed, quantised, is_fine_qkv)
    none, num_threads = hidden[:0], model.num_threads
    linear_phase(progress[1], normed, layer.qkv, layer.qkv_bias, none, quantised, qkv, num_threads)
    heads = qkv.reshape((rows, qkv.shape[1] // head_dim, head_dim))
    rotary_phase(
        progress[2],
        heads,
        layer.head_norms,
        model.epsilon,
        model.cosines,
        model.sines,
        positions,
        layer.scales,
        slots,
        cache.keys,
        cache.values,
    )


@njit(nogil=True, cache=True, error_model="numpy")
def _add_product(  # type: ignore[no-untyped-def]
    progress, hidden, x, table, bias, norm, model, buffers
) -> None:
    """Compute `hidden += norm(product(x))`; an empty `norm` is none. `normed` is overwritten."""
    quantised, num_threads = buffers.quantised, model.num_threads
    quantise_phase(progress[0], x, quantised, is_fine(table))
    if not norm.size:
        linear_phase(progress[1], x, table, bias, hidden, quantised, hidden, num_threads)
        return
    none, product = hidden[:0], buffers.normed
    linear_phase(progress[1], x, table, bias, none, quantised, product, num_threads)
    add_norm_phase(progress[2], product, norm, model.epsilon, hidden)


@njit(nogil=True, cache=True, error_model="numpy")
def _attend_and_add(  # type: ignore[no-untyped-def]
    progress, hidden, layer, model, cache, work, buffers
) -> None:
    """Compute `hidden += output(attention(qkv))`; `work` is an `Attended`."""
    qkv, attended = buffers.qkv, buffers.attended
    rows = hidden.shape[0]
    head_dim = work.parts.shape[1] - STATE_LANES
    heads = qkv.reshape((rows, qkv.shape[1] // head_dim, head_dim))
    out = attended.reshape((rows, attended.shape[1] // head_dim, head_dim))
    attention_phase(
        progress[0],
        heads,
        cache.keys,
        cache.values,
        work.block_tables,
        work.positions,
        work.window,
        work.items,
        layer.sinks,
        work.parts,
        out,
    )
    merge_phase(progress[1], work.positions, work.window, work.merges, layer.sinks, work.parts, out)
    output, bias, norm = layer.output, layer.output_bias, layer.attended_norm
    _add_product(progress[2:], hidden, attended, output, bias, norm, model, buffers)


@njit(nogil=True, cache=True, error_model="numpy")
def _mlp_half(progress, hidden, layer, model, buffers) -> None:  # type: ignore[no-untyped-def]
    """Compute `hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))`, or with `gelu`."""
    normed, gated, quantised = buffers.normed, buffers.gated, buffers.quantised
    gate_up, bias, num_threads = layer.gate_up, layer.gate_up_bias, model.num_threads
    is_fine_mlp = is_fine(gate_up)
    norm_phase(progress[0], hidden, layer.mlp_norm, model.epsilon, normed, quantised, is_fine_mlp)
    gated_phase(progress[1], normed, gate_up, bias, model.activation, quantised, gated, num_threads)
    down, down_bias, norm = layer.down, layer.down_bias, layer.mlp_output_norm
    _add_product(progress[2:], hidden, gated, down, down_bias, norm, model, buffers)


@njit(nogil=True, cache=True, error_model="numpy")
def _members_of_layer(  # type: ignore[no-untyped-def]
    _member, progress, hidden, layer, model, cache, slots, work, buffers
) -> None:
    _project_and_store(progress, hidden, layer, model, cache, work.positions, slots, buffers)
    at = _PROJECT_PHASES
    _attend_and_add(progress[at:], hidden, layer, model, cache, work, buffers)
    _mlp_half(progress[at + _ATTEND_PHASES :], hidden, layer, model, buffers)


@njit(nogil=True, cache=True, error_model="numpy")
def whole_layer(hidden, layer, slots, work, buffers) -> None:  # type: ignore[no-untyped-def]
    """Compute a layer in one call: entering compiled code costs as much as a small kernel.

    `layer` is (`LayerTables`, `LayerConstants`, `LayerCache`), `work` an `Attended` and `buffers` a
    `LayerBuffers`, all as plain tuples.
    """
    tables, constants, cache = layer
    model = LayerConstants(*constants)
    run_team(
        _members_of_layer,
        model.num_threads,
        (
            new_progress(_PROJECT_PHASES + _ATTEND_PHASES + _MLP_PHASES),
            hidden,
            LayerTables(*tables),
            model,
            LayerCache(*cache),
            slots,
            Attended(*work),
            LayerBuffers(*buffers),
        ),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def _expert_half(progress, hidden, layer, experts, model, buffers, chosen, member) -> None:  # type: ignore[no-untyped-def]
    """Add the outputs of each row's experts to `hidden`, and then that of the shared MLP."""
    normed, quantised, num_threads = buffers.normed, buffers.quantised, model.num_threads
    none = hidden[:0]
    is_fine_mlp, gate = is_fine(experts.gate_up), experts.expert_gate
    norm_phase(progress[0], hidden, layer.mlp_norm, model.epsilon, normed, quantised, is_fine_mlp)
    bias = experts.gate_bias
    linear_phase(progress[1], normed, gate, bias, none, none, chosen.scores, num_threads)
    choice_phase(progress[2], experts, chosen)
    order_phase(progress[3], chosen)
    expert_gated_phase(progress[4], normed, quantised, experts, chosen, member, num_threads)
    quantise_phase(progress[5], chosen.gated, quantised, is_fine(experts.down))
    expert_down_phase(progress[6], hidden, quantised, experts, chosen, member, num_threads)
    gate_up, down, gated = layer.gate_up, layer.down, chosen.shared_gated
    if gate_up.shape[0] == 0:
        return
    at = _EXPERT_PHASES
    quantise_phase(progress[at], normed, quantised, is_fine(gate_up))
    bias, activation = layer.gate_up_bias, model.activation
    gated_phase(progress[at + 1], normed, gate_up, bias, activation, quantised, gated, num_threads)
    quantise_phase(progress[at + 2], gated, quantised, is_fine(down))
    bias = layer.down_bias
    linear_phase(progress[at + 3], gated, down, bias, hidden, quantised, hidden, num_threads)


@njit(nogil=True, cache=True, error_model="numpy")
def _members_of_expert_layer(  # type: ignore[no-untyped-def]
    member, progress, hidden, layer, experts, model, cache, slots, work, buffers, chosen
) -> None:
    _project_and_store(progress, hidden, layer, model, cache, work.positions, slots, buffers)
    at = _PROJECT_PHASES
    _attend_and_add(progress[at:], hidden, layer, model, cache, work, buffers)
    at += _ATTEND_PHASES
    _expert_half(progress[at:], hidden, layer, experts, model, buffers, chosen, member)


@njit(nogil=True, cache=True, error_model="numpy")
def whole_expert_layer(hidden, layer, experts, slots, work, buffers, chosen) -> None:  # type: ignore[no-untyped-def]
    """Compute a layer with experts as `whole_layer` does one with an MLP.

    `experts` is an `ExpertTables` and `chosen` an `ExpertBuffers`, both as plain tuples. A function
    of its own: a model without experts does not compile it.
    """
    tables, constants, cache = layer
    model = LayerConstants(*constants)
    run_team(
        _members_of_expert_layer,
        model.num_threads,
        (
            new_progress(_PROJECT_PHASES + _ATTEND_PHASES + _EXPERT_PHASES + _MLP_PHASES),
            hidden,
            LayerTables(*tables),
            ExpertTables(*experts),
            model,
            LayerCache(*cache),
            slots,
            Attended(*work),
            LayerBuffers(*buffers),
            ExpertBuffers(*chosen),
        ),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def _members_entering(  # type: ignore[no-untyped-def]
    _member, progress, states, entry, layer, model, cache, positions, slots, inputs, buffers
) -> None:
    normed, quantised, epsilon = buffers.normed, buffers.quantised, model.epsilon
    token, own, num_threads = entry.token, entry.hidden, model.num_threads
    norm_phase(
        progress[0], inputs, entry.embedding_norm, epsilon, normed, quantised, is_fine(token)
    )
    none = inputs[:0]
    linear_phase(progress[1], normed, token, entry.bias, none, quantised, inputs, num_threads)
    norm_phase(progress[2], states, entry.hidden_norm, epsilon, normed, quantised, is_fine(own))
    no_bias = entry.bias[:0]
    linear_phase(progress[3], normed, own, no_bias, inputs, quantised, inputs, num_threads)
    _project_and_store(progress[4:], inputs, layer, model, cache, positions, slots, buffers)


@njit(nogil=True, cache=True, error_model="numpy")
def enter_mtp(  # type: ignore[no-untyped-def]
    token_ids, embedding, states, entry, layer, positions, slots, inputs, buffers
) -> None:
    """Compute `inputs` from tokens and `states`, write their keys and values, and compute `qkv`.

    `entry` is an `MtpEntry` as a plain tuple, `layer` and `buffers` are as in `whole_layer`;
    `attended` and `gated` are not used.
    """
    gather_columns(embedding, token_ids, inputs)
    tables, constants, cache = layer
    model = LayerConstants(*constants)
    run_team(
        _members_entering,
        model.num_threads,
        (
            new_progress(4 + _PROJECT_PHASES),
            states,
            MtpEntry(*entry),
            LayerTables(*tables),
            model,
            LayerCache(*cache),
            positions,
            slots,
            inputs,
            LayerBuffers(*buffers),
        ),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def _members_leaving(  # type: ignore[no-untyped-def]
    _member, progress, outputs, layer, model, cache, work, output_norm, head, buffers, logits
) -> None:
    normed, quantised, num_threads = buffers.normed, buffers.quantised, model.num_threads
    _attend_and_add(progress, outputs, layer, model, cache, work, buffers)
    _mlp_half(progress[_ATTEND_PHASES:], outputs, layer, model, buffers)
    at, no_bias, none = _ATTEND_PHASES + _MLP_PHASES, layer.output_bias[:0], outputs[:0]
    norm_phase(progress[at], outputs, output_norm, model.epsilon, normed, quantised, is_fine(head))
    linear_phase(progress[at + 1], normed, head, no_bias, none, quantised, logits, num_threads)


@njit(nogil=True, cache=True, error_model="numpy")
def leave_mtp(outputs, layer, work, output_norm, head, buffers, logits) -> None:  # type: ignore[no-untyped-def]
    """Compute the rest of the layer over `outputs` in place, from the queries in `buffers`.

    Its `normed` is the input of the head then. `layer`, `work` and `buffers` are as in
    `whole_layer`.
    """
    tables, constants, cache = layer
    model = LayerConstants(*constants)
    run_team(
        _members_leaving,
        model.num_threads,
        (
            new_progress(_ATTEND_PHASES + _MLP_PHASES + 2),
            outputs,
            LayerTables(*tables),
            model,
            LayerCache(*cache),
            Attended(*work),
            output_norm,
            head,
            LayerBuffers(*buffers),
            logits,
        ),
    )
