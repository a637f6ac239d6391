"""What a recording shows of requests, models, results and decisions of a node: pure.

Recorder and replay show a decision in the same way, and compare what is shown.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from common.ids import AttemptId
from common.kv.blocks import BlockHash
from common.kv.kv_layout import KVLayout
from engine.core.runner_contract import RunnerResult, StepCosts
from engine.core.step.step_in_flight import PlannedStep, Pushes
from node.flow.messages import AnswerCall, CallRefused, Effect, SendOutput

FLOW_CALLS = (
    "on_message",
    "on_time",
    "begin_step",
    "pushes",
    "plan_ahead",
    "end_step",
    "report",
    "fail_step",
    "on_stop",
)
"""The calls that change the state of the flow; all others only read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedModel:
    """The facts of a model and its cache that a flow and its scheduler are made of."""

    layout: KVLayout
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    pairs_per_token: int
    step_costs: StepCosts
    needs_staging: bool
    stages_landings: bool
    can_go_on: bool
    has_grammars: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """A request without its tokens: `hashes` are those of all full blocks that it begins with.

    With `is_unknown` a token of it is none of the model's.
    """

    id: AttemptId
    num_prompt_tokens: int
    num_output_tokens: int = 0
    max_tokens: int
    prompt_logprobs: int | None = None
    has_grammar: bool = False
    is_unknown: bool = False
    deadline_s: float
    priority: int = 0
    hashes: tuple[BlockHash, ...] = ()


def gave_json(call: str, found: Any) -> Any:
    """Return what a call of a flow gave, or what it raised; None: nothing."""
    if isinstance(found, Exception):
        return {"raised": type(found).__name__}
    if call == "begin_step":
        step, effects = found
        gave = {"plan": plan_json(step)}
        return gave | ({"effects": shown} if (shown := effects_json(effects)) else {})
    if isinstance(found, Pushes):
        return {"effects": effects_json(found.before), "of_layers": found.of_layer is not None}
    return {"effects": shown} if (shown := effects_json(found or ())) else None


def effects_json(effects: Iterable[Effect]) -> list[str]:
    """Return the effects in words, equal ones in a row once with their number."""
    runs = [(words, len(list(run))) for words, run in groupby(map(_words, effects))]
    return [words if count == 1 else f"{words} x{count}" for words, count in runs]


def _words(effect: Effect) -> str:
    name = type(effect).__name__
    match effect:
        case AnswerCall(reply_to, CallRefused(error)):
            return f"{name} {reply_to} {error.code}"
        case AnswerCall(reply_to, answer):
            return f"{name} {reply_to} {type(answer).__name__}"
        case SendOutput(_, output):
            ends = output.details.finish_reason
            words = f"{name} {len(output.token_ids)}"
            return words if ends is None else f"{words} {output.id} {ends.value}"
    return name


def plan_json(step: PlannedStep) -> dict[str, Any]:
    """Return all that a planned step decides. `blocks` is a checksum of the tables of blocks."""
    plan: dict[str, Any] = {"stopped_by": step.stopped_by.value}
    batch = step.batch
    if len(batch):
        tables = batch.seats.block_tables
        checksum = 0
        for row, count in zip(batch.rows, batch.seats.num_blocks[batch.rows], strict=True):
            checksum = zlib.crc32(tables[row, :count].tobytes(), checksum)
        plan["ids"] = _ids(step.sequences)
        plan["starts"] = batch.starts.tolist()
        plan["tokens"] = batch.num_tokens.tolist()
        plan["blocks"] = checksum
        if batch.num_drafts.any():
            plan["drafts"] = batch.num_drafts.tolist()
        if batch.going_on is not None:
            plan["going_on"] = batch.going_on.tolist()
    counts = {
        "preempted": step.num_preempted,
        "swapped_out": sum(len(copy.block_ids) for copy in step.swap_outs),
        "swapped_in": sum(len(copy.block_ids) for copy in step.swap_ins),
        "copies": len(step.swap_copies),
    }
    plan |= {name: count for name, count in counts.items() if count}
    if step.reserved:
        plan["reserved"] = _ids(step.reserved)
    if step.starved:
        plan["starved"] = _ids(step.starved)
    return plan


def _ids(sequences: Iterable[Any]) -> list[int]:
    return [sequence.sequence_id for sequence in sequences]


def drawn_json(step: PlannedStep, results: RunnerResult) -> dict[str, Any]:
    """Return what a step drew, without tokens; nothing where each entry that draws drew one.

    `drawn` are their numbers. `ends` are entries and which of their tokens ended the answer, and
    `drafts` and `forced` entries and how many tokens are proposed and certain after them.
    `left_behind` are the entries that the step which was begun after this one does not have.
    """
    counts = [0 if one is None else len(one.token_ids) for one in results]
    found: dict[str, Any] = {}
    if counts != step.batch.is_sampled.astype(np.int64).tolist():
        found["drawn"] = counts
    ends, drafts, forced = [], [], []
    for entry, one in enumerate(results):
        if one is None:
            continue
        end_tokens = step.sequences[entry].end_token_ids
        ends += [[entry, i] for i, token in enumerate(one.token_ids) if token in end_tokens][:1]
        drafts += [[entry, len(one.draft_token_ids)]] if one.draft_token_ids else []
        forced += [[entry, len(one.forced_token_ids)]] if one.forced_token_ids else []
    pairs = {"ends": ends, "drafts": drafts, "forced": forced}
    found |= {name: value for name, value in pairs.items() if value}
    if results.prompt_logprobs:
        found["scored"] = sorted(results.prompt_logprobs)
    if results.left_behind:
        found["left_behind"] = sorted(results.left_behind)
    if results.num_steps > 1:
        found["num_steps"] = results.num_steps
    return found
