"""Whole steps: decoding as a graph, attention, prefill, and a host that reads along."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from engine.runner.gpu.attention_launches import FEW_SEQUENCES
from engine.runner.gpu.launches import AttentionShape, Bound, Launches
from engine.runner.gpu.steps.chunk_step import ChunkRow, ChunkStep
from engine.runner.gpu.weights import DecoderWeights
from tests.gpu.decoding import Decoding
from tests.gpu.stages.ceilings import matrix_tflops, read_gb_s
from tests.gpu.stages.model import (
    BLOCK,
    CONTEXT,
    NUM_BLOCKS,
    PIECE,
    QWEN3_8B,
    Findings,
    Model,
)


def decode_step(
    card: Any, model: Model, count: int, context: int, shape: AttentionShape, **options: Any
) -> Decoding:
    return started_step(card, model.launches(card, shape, **options), count, context)


def started_step(card: Any, make: Launches, count: int, context: int) -> Decoding:
    """Return a step of `count` rows with some context each."""
    step = Decoding(card.device, make, card.stream, count, context + 200)
    _set_context(step, context)
    if card.is_real:
        step.drawn()
    else:
        step.launch()
    return step


def _set_context(step: Decoding, context: int) -> None:
    """Let the next step be the one after which every row has so many tokens."""
    count, blocks = step.count, step.table_width
    tables = np.arange(count * blocks).reshape(count, blocks) % NUM_BLOCKS
    rng = np.random.default_rng(1)
    step.set_rows(
        rng.integers(0, 1000, count), np.full(count, context - 1), tables, np.full(count, 1.0),
        np.arange(count),
    )  # fmt: skip


_READ_STEPS = 60
_KINDS = ("qkv", "rotate", "pieces", "merge", "output", "norm", "gate_up", "down", "next norm")


def step(card: Any, found: Findings) -> None:
    """A whole decoding step as a graph, and what each of its kernels costs."""
    model = Model.of(card)
    read_gb_s(card, found)
    results = found.setdefault("step", {})
    for count in (1, 8, 32, 128):
        fixed = decode_step(card, model, count, CONTEXT, AttentionShape())
        if card.is_real:
            time_step(card, found, fixed, model.weights, f"{count}")
            layers = fixed.launches[2:-3]
            kinds = {
                kind: round(card.graph_milliseconds(layers[place::9], 3) * 1e3 / 36, 2)
                for place, kind in enumerate(_KINDS)
            }
            kinds["head"] = round(card.graph_milliseconds(fixed.launches[-3:-2], 3) * 1e3, 1)
            kinds["draw"] = round(card.graph_milliseconds(fixed.launches[-2:], 3) * 1e3, 1)
            results[f"{count} us"] = kinds
            print(kinds, flush=True)
        fixed.close()
    plain = decode_step(card, model, 1, CONTEXT, AttentionShape(), is_programmatic=False)
    if card.is_real:
        time_step(card, found, plain, model.weights, "1, plain launches")
    plain.close()


def time_step(
    card: Any, found: Findings, fixed: Decoding, weights: DecoderWeights, label: str
) -> float:
    """Capture the step, time it, and keep it beside its floor."""
    count = fixed.count
    bytes_read = weights.step_bytes + count * CONTEXT * 36 * 2 * 8 * 128 * 2
    floor = bytes_read / read_gb_s(card, found) / 1e6
    fixed.capture()
    spent = card.milliseconds(fixed.run, 20, 5)
    found.setdefault("step", {})[label] = {
        "ms": round(spent, 3),
        "floor_ms": round(floor, 3),
        "share": round(floor / spent, 3),
    }
    print(f"step of {label}: {found['step'][label]}", flush=True)
    return float(spent)


def attention(card: Any, found: Findings) -> None:
    """Attention of a decoding step, by piece, programs, warps and stages."""
    model = Model.of(card)
    results = found.setdefault("attention", {})
    for count, context in ((1, 1000), (8, 1000), (32, 1000), (128, 1000), (1, 32000)):
        timed = []
        for piece in (128, 256, 512):
            for programs in (132, 264, 396, 528):
                for stages, warps in ((3, 4), (5, 4), (7, 4), (4, 8)):
                    if programs > (264 if stages > 4 else 528) or (stages == 7 and programs > 132):
                        continue
                    shape = AttentionShape(
                        piece=piece,
                        programs=programs,
                        few_programs=programs,
                        stages=stages,
                        few_stages=stages,
                        num_warps=warps,
                    )
                    fixed = decode_step(card, model, count, context, shape)
                    if card.is_real:
                        fixed.launch()
                        spent = card.graph_milliseconds(_attention_of(fixed), 2) * 1e3 / 36
                        timed.append((round(spent, 2), piece, programs, stages, warps))
                    fixed.close()
        timed.sort()
        size = count * context * 2 * 8 * 128 * 2
        if timed:
            best = min(one for one in timed if one[1] == PIECE)
            results[f"{count} x {context}"] = {
                "us": best[0], "gb_s": round(size / best[0] / 1e3), "best": timed[:5],
                "shipped_us": next(one[0] for one in timed if one[1:] == _shipped(count)),
                "piece": {p: min(t for t in timed if t[1] == p) for p in (128, 256, 512)},
            }  # fmt: skip
            print(f"attention {count} x {context}: {results[f'{count} x {context}']}", flush=True)
    _time_windows(card, found, model)


_WINDOW = 4096


def _time_windows(card: Any, found: Findings, model: Model) -> None:
    """A decoding step at 32,000 tokens with a window in every layer, beside all tokens, and beside
    a context as long as the window."""
    windows = (_WINDOW,) * QWEN3_8B.num_layers
    for label, context, own in (
        ("of all tokens", 32000, ()), ("of a window", 32000, windows),
        ("of as many tokens as a window has", _WINDOW, ()),
    ):  # fmt: skip
        for count in (1, 4):
            fixed = decode_step(card, model, count, context, AttentionShape(), windows=own)
            if card.is_real:
                fixed.launch()
                spent = card.graph_milliseconds(_attention_of(fixed), 2) * 1e3 / 36
                fixed.capture()
                found.setdefault("windows", {})[f"{count}, {label}"] = {
                    "attention_us": round(spent, 2),
                    "step_ms": round(card.milliseconds(fixed.run, 10, 3), 3),
                }
            fixed.close()
    print("windows:", found.get("windows"), flush=True)


def _attention_of(fixed: Decoding) -> list[Bound]:
    """Return the launches of attention of all layers of a step with one list of pieces."""
    layers = fixed.launches[2:-3]
    return [one for place in range(36) for one in layers[9 * place + 2 :][:2]]


def _shipped(count: int) -> tuple[int, int, int, int]:
    """Return the piece, programs, stages and warps of the attention of so many sequences."""
    shape = AttentionShape()
    if count <= FEW_SEQUENCES:
        return shape.piece, shape.few_programs, shape.few_stages, shape.num_warps
    return shape.piece, shape.programs, shape.stages, shape.num_warps


def prefill(card: Any, found: Findings) -> None:
    """A prompt's chunk: 512 and 4,096 tokens."""
    model = Model.of(card)
    peak = matrix_tflops(card, found)
    results = found.setdefault("prefill", {})
    spec = QWEN3_8B
    matrix = 2 * 36 * (6144 * 4096 + 4096 * 4096 + 3 * 4096 * 12288)
    for length in (512, 4096):
        for piece, rows, warps, stages in (
            (256, 128, 8, 3), (256, 128, 8, 4), (256, 128, 8, 5), (1 << 20, 128, 8, 4),
        ):  # fmt: skip
            shape = AttentionShape(
                piece=piece, chunk_rows=rows, chunk_warps=warps, chunk_stages=stages
            )
            make = model.launches(card, shape)
            chunks = ChunkStep(card.device, make, card.stream, length, 1, length)
            prompt = [token % 1000 for token in range(length)]
            chunk = ChunkRow(prompt, 0, range(-(-length // BLOCK)))
            chunks.run([chunk])
            num_tiles = -(-length // (rows // 4))
            launches = chunks.plan([chunk], length, num_tiles)
            if card.is_real:
                spent = card.graph_milliseconds(launches, 1, 5)
                flops = matrix * length + 4 * spec.num_layers * spec.num_heads * 128 * length**2 / 2
                layers = launches[1:-1]
                kinds = {
                    kind: round(card.graph_milliseconds(layers[place::8], 1) * 1e3 / 36, 1)
                    for place, kind in enumerate(
                        ("qkv", "rotate", "attention", "output", "norm", "gate_up", "down", "next")
                    )
                }
                results[f"{length} piece {piece} rows {rows} s{stages}"] = {
                    "ms": round(spent, 2), "tflops": round(flops / spent / 1e9, 1),
                    "share": peak and round(flops / spent / 1e9 / peak, 3), "us": kinds,
                }  # fmt: skip
                print(length, piece, rows, stages, list(results.values())[-1], flush=True)
            chunks.close()
        if card.is_real:
            merged, running = (
                results[f"{length} piece {piece} rows 128 s4"]["ms"] for piece in (PIECE, 1 << 20)
            )
            results[f"{length}, price of pieces"] = round(merged / running - 1, 4)


def host(card: Any, found: Findings) -> None:
    """Steps whose tokens the host reads one step later, beside steps that nobody reads.

    `share` is the host's part: what a step takes longer, of the step.
    """
    model = Model.of(card)
    results = found.setdefault("host", {})
    for count in (1, 8, 64):
        fixed = decode_step(card, model, count, CONTEXT, AttentionShape())
        if card.is_real:
            fixed.capture()
            alone = card.milliseconds(fixed.run, 20, 3)
            # In the middle of the steps that are read, rows have as many tokens as in this one.
            _set_context(fixed, CONTEXT - _READ_STEPS // 2)
            read = _read_steps(fixed, _READ_STEPS)
            results[f"{count}"] = {
                "alone_ms": round(alone, 3), "read_ms": round(read, 3),
                "share": round(read / alone - 1, 4),
            }  # fmt: skip
            print(f"host, {count}: {results[f'{count}']}", flush=True)
        fixed.close()


def _read_steps(fixed: Decoding, num_steps: int) -> float:
    """Run steps, reading each step's tokens while the next one runs; return milliseconds a step."""
    fixed.begin()
    num_read, begun = 0, time.perf_counter()
    for _ in range(num_steps):
        fixed.go_on()
        num_read += bool((fixed.tokens() >= 0).all())
    spent = (time.perf_counter() - begun) * 1e3 / num_steps
    fixed.drawn()  # all that is queued has ended then
    return spent if num_read == num_steps else float("nan")
