"""The recording of a node: the inputs of its flow, and its decisions.

A line is one call of `NodeFlow`, or a lease token that was drawn during the call of a later line.
`simulator/replays` makes the same calls again. Prompts are their lengths and the hashes of their
blocks. What was drawn is how many tokens, and which of them ended an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from common.errors import InternalError
from common.ids import Incarnation
from common.kv.blocks import BlockHash, hash_full_blocks
from common.kv.kv_layout import KVLayout
from common.recording.calls import recorded
from common.recording.file import RecordingFile
from common.recording.pseudonyms import Pseudonyms
from common.recording.values import as_json
from common.request import GenerationRequest
from common.settings.config import Config
from engine.core.sequences.sequence import Sequence as SeatedSequence
from engine.core.step.step_in_flight import PlannedStep
from kv_transfer.contract import ConnectorFailed, Landed, Ticket
from node.flow.attempts.attempt_table import AttemptTable
from node.flow.messages import CopyEnded, FetchBlocks, Message, SendBlocks, Submit
from node.flow.node_flow import NodeFlow
from node.life.node_parts import LoadedModel, NodeConnector
from node.life.recorded_steps import (
    FLOW_CALLS,
    RecordedModel,
    RecordedRequest,
    drawn_json,
    gave_json,
)

RECORDED_SECTIONS = ("role", "engine", "scheduling", "speculation", "handoff")
"""What of a configuration decides what a node decides."""
MOST_KNOWN = 4096
"""Sequences whose written hashes are known. Hashes that are written twice do no harm."""


def record_steps(
    folder: Path,
    config: Config,
    model: LoadedModel,
    incarnation: Incarnation,
    connector: NodeConnector,
) -> StepRecording:
    """Begin the recording of a node. Raises `ConfigError` where it cannot be written."""
    facts = {field.name: getattr(model, field.name) for field in fields(RecordedModel)}
    header = {
        "of": "steps",
        "node_id": incarnation.node_id,
        "epoch": incarnation.epoch,
        "kv_endpoint": connector.endpoint,
        "config": {name: as_json(getattr(config, name)) for name in RECORDED_SECTIONS},
        "model": as_json(RecordedModel(**facts)),
    }
    file = RecordingFile(folder, incarnation.node_id, header)
    return StepRecording(file, model.layout, vocab_size=model.vocab_size)


class StepRecording:
    """Records the calls of one flow. Belongs to the step thread, once that runs."""

    def __init__(self, file: RecordingFile, layout: KVLayout, *, vocab_size: int) -> None:
        self._file = file
        self._names = Pseudonyms()
        self._layout, self._vocab_size = layout, vocab_size
        self._fingerprint = layout.fingerprint
        self._num_hashed: dict[int, int] = {}
        """Blocks by sequence whose hashes were written."""
        self._step: PlannedStep | None = None
        self._attempts = AttemptTable()

    def of_flow(self, flow: NodeFlow) -> NodeFlow:
        """Return what stands in for a flow of the step loop."""
        self._attempts = flow.attempts
        return recorded(flow, FLOW_CALLS, self._write, self._file)

    def drawing(self, new_lease_token: Callable[[], int]) -> Callable[[], int]:
        """Return what draws lease tokens in the same way, and records that."""

        def draw() -> int:
            token = new_lease_token()
            self._file.write({"token": self._names.of_key(token)})
            return token

        return draw

    def close(self) -> None:
        """End the file."""
        self._file.close()

    # --- one call -----------------------------------------------------------------------------

    def _write(self, call: str, given: tuple[Any, ...], named: dict[str, Any], found: Any) -> None:
        line: dict[str, Any] = {"call": call}
        match call:
            case "on_message":
                line["message"] = self._message(given[0])
                line["now_s"] = given[1]
            case "on_time" | "begin_step":
                line["now_s"] = given[0]
            case "end_step":
                step, results, line["now_s"] = given
                line |= self._step_entry(step) | drawn_json(step, results)
                if step.took_s:
                    line["took_s"] = step.took_s
                hashes = self._new_hashes(step.sequences)
                if hashes:
                    line["hashes"] = hashes
            case "fail_step":
                step, error, line["now_s"] = given
                line |= self._step_entry(step)
                line["error"] = as_json(_typed(error))
            case "pushes" | "plan_ahead":
                line |= self._step_entry(given[0])
        if call == "begin_step" and not isinstance(found, Exception):
            self._step = found[0]
        gave = gave_json(call, found)
        if gave:
            line["gave"] = gave
        self._file.write(line)

    def _step_entry(self, step: PlannedStep) -> dict[str, Any]:
        """Return which part of the step that was planned last it is, and whether the runner has
        begun the one after."""
        entry: dict[str, Any] = {}
        if step is not self._step:
            entry["part"] = [sequence.sequence_id for sequence in step.sequences]
        if step.batch.has_gone_on:
            entry["has_gone_on"] = True
        return entry

    def _new_hashes(self, sequences: Iterable[SeatedSequence]) -> list[Any]:
        """Return the blocks that were hashed since the last time, but those of requests."""
        found = []
        if len(self._num_hashed) > MOST_KNOWN:
            self._num_hashed.clear()
        for sequence in sequences:
            hashes, name = sequence.block_hashes, sequence.sequence_id
            known = self._num_hashed.get(name)
            if known is None:
                request = sequence.request
                num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
                known = self._num_hashed[name] = num_tokens // self._layout.block_size
            if len(hashes) > known:
                named = [self._names.of_block(one).hex() for one in hashes[known:]]
                found.append([name, known, named])
                self._num_hashed[name] = len(hashes)
        return found

    # --- messages -----------------------------------------------------------------------------

    def _message(self, message: Message) -> Any:
        shown = as_json(self._shown(message))
        if isinstance(message, Submit):
            attempt = self._attempts.get(message.request.id)
            if attempt is not None:
                shown["sequence_id"] = attempt.sequence.sequence_id
        return shown

    def _shown(self, message: Any) -> Any:
        """Return a message without tokens, and with other names for what is secret."""
        names = self._names
        if isinstance(message, CopyEnded):
            return replace(message, error=message.error and _typed(message.error))
        if isinstance(message, ConnectorFailed):
            return replace(message, error=_typed(message.error))
        if isinstance(message, SendBlocks | FetchBlocks):
            block_hashes = tuple(map(names.of_block, message.block_hashes))
            message = replace(message, block_hashes=block_hashes)
        if isinstance(message, Landed):
            message = replace(message, commit=self._shown_commit(message))
        ticket = getattr(message, "ticket", None)
        if isinstance(ticket, Ticket):
            hidden = replace(ticket, lease_token=names.of_key(ticket.lease_token))
            message = replace(message, ticket=hidden)
        token = getattr(message, "lease_token", None)
        if token is not None:
            message = replace(message, lease_token=names.of_key(token))
        if isinstance(message, Submit):
            message = replace(message, request=self._shown_request(message.request))
        return message

    def _shown_commit(self, landed: Landed) -> Any:
        """Return the commit with made-up tokens: 1 for one of the model's, else -1."""
        commit = landed.commit
        first, *drafts = (
            1 if 0 <= token < self._vocab_size else -1
            for token in (commit.first_token_id, *commit.draft_token_ids)
        )
        return replace(commit, first_token_id=first, draft_token_ids=tuple(drafts))

    def _shown_request(self, request: GenerationRequest) -> Any:
        tokens = (*request.prompt_token_ids, *request.output_token_ids)
        sampling, size = request.sampling, self._layout.block_size
        highest = max(max(tokens), sampling.rules.highest_token_id)
        is_unknown = highest >= self._vocab_size
        hashes: Sequence[BlockHash] = ()
        if not is_unknown:
            hashes = hash_full_blocks(tokens, size, self._fingerprint, request.cache_salt)
        return RecordedRequest(
            id=request.id,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=len(request.output_token_ids),
            max_tokens=sampling.max_tokens,
            prompt_logprobs=sampling.prompt_logprobs,
            has_grammar=sampling.grammar is not None,
            is_unknown=is_unknown,
            deadline_s=request.deadline_s,
            priority=request.priority,
            hashes=tuple(map(self._names.of_block, hashes)),
        )


def _typed(error: BaseException) -> InternalError:
    """Return an error without its text, which may be anything."""
    return InternalError(type(error).__name__)
