"""The steps of a node, planned again: the same calls of a new flow with a new scheduler."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from common.errors import ConfigError, PdserveError
from common.grammar import Grammar, GrammarKind
from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout, LayerShape
from common.kv.prefix_source import PrefixSource
from common.nodes import Role
from common.prompt_logprobs import PromptLogprobs
from common.recording.file import read_recording
from common.recording.values import ValueReader
from common.request import GenerationRequest, SamplingParams
from common.settings.config import Config, EngineConfig, SpeculationConfig
from common.settings.handoff_config import HandoffConfig
from common.settings.scheduling_config import SchedulingConfig
from engine.core.runner_contract import DrawnTokens, RunnerResult, StepCosts
from engine.core.sequences.sequence import Sequence
from engine.core.step.step_in_flight import PlannedStep
from kv_transfer.contract import Commit, Landed, Ticket
from kv_transfer.sending.transfer_errors import TransferAborted
from kv_transfer.transfer_timing import TransferTiming
from node.flow.messages import FetchBlocks, Message, SendBlocks, Submit
from node.flow.node_flow import NodeFlow
from node.life.make_flow import flow_maker
from node.life.make_scheduler import make_scheduler
from node.life.node_parts import LoadedModel, NodeConnector
from node.life.recorded_steps import FLOW_CALLS, RecordedModel, RecordedRequest, gave_json
from simulator.replays.compared import Compared, Difference
from simulator.replays.made_up_tokens import END_TOKEN, UNKNOWN_TOKEN, VOCAB_SIZE, MadeUpTokens

_NO_LOGPROBS = PromptLogprobs(0, (), (), (), ())
_SOME_GRAMMAR = Grammar(GrammarKind.REGEX, "x")
_BAD_LINE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def _errors(error: type[PdserveError]) -> list[type[PdserveError]]:
    return [error, *(one for below in error.__subclasses__() for one in _errors(below))]


_READER = ValueReader(
    *get_args(Message),
    *_errors(PdserveError),
    AttemptId,
    Commit,
    EngineConfig,
    HandoffConfig,
    Incarnation,
    KVLayout,
    LayerShape,
    PrefixSource,
    RecordedModel,
    RecordedRequest,
    Role,
    SchedulingConfig,
    SpeculationConfig,
    StepCosts,
    Ticket,
    TransferAborted,
    TransferTiming,
)


@dataclass(frozen=True, slots=True)
class _ModelThen:
    """A recorded model as a flow is made of it."""

    facts: RecordedModel
    vocab_size: int = VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset((END_TOKEN,))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.facts, name)


@dataclass(frozen=True, slots=True)
class _ConnectorThen:
    endpoint: str


class StepCalls:
    """The calls of one flow. `lease_tokens` are the recorded tokens that it draws, in order."""

    def __init__(self, flow: NodeFlow, layout: KVLayout, lease_tokens: deque[int]) -> None:
        self._flow = flow
        self._lease_tokens = lease_tokens
        self._tokens = MadeUpTokens(layout.fingerprint, layout.block_size)
        self._step = PlannedStep()

    def learn_hashes(self, path: Path) -> None:
        """Read the hashes of all blocks: the tokens of a block come long before it is full.

        Raises `ConfigError`, which names the line.
        """
        _, lines = read_recording(path)
        for number, line in lines:
            try:
                for sequence_id, first, hashes in line.get("hashes", ()):
                    self._tokens.add(sequence_id, first, map(bytes.fromhex, hashes))
                asked = line.get("message", {})
                if "sequence_id" in asked:
                    request = _READER.read(asked["request"])
                    self._tokens.add(asked["sequence_id"], 0, request.hashes)
            except _BAD_LINE as error:
                raise ConfigError(f"line {number}: no hashes are read of it: {error!r}") from error
        self._tokens.tell_hashes()

    def call(self, line: dict[str, Any]) -> Callable[[], Any] | None:
        """Return the call of a line; None: it has a lease token, which a later call draws.

        Raises `ValueError`, or another error of `_BAD_LINE`, for a malformed line.
        """
        if "token" in line:
            self._lease_tokens.append(int(line["token"]))
            return None
        name = line["call"]
        if name not in FLOW_CALLS:
            raise ValueError(f"{name!r} is no call of a flow")
        call = getattr(self._flow, name)
        match name:
            case "on_message":
                message = self._message(line["message"])
                return lambda: call(message, line["now_s"])
            case "on_time":
                return lambda: call(line["now_s"])
            case "begin_step":
                return lambda: self._begin_step(line["now_s"])
            case "report" | "on_stop":
                return lambda: call()
        step = self._part(line)
        match name:
            case "end_step":
                step.took_s = line.get("took_s", 0.0)
                results = self._results(step, line)
                return lambda: call(step, results, line["now_s"])
            case "fail_step":
                error = _READER.read(line["error"])
                return lambda: call(step, error, line["now_s"])
        return lambda: call(step)

    def _begin_step(self, now_s: float) -> Any:
        self._step, effects = self._flow.begin_step(now_s)
        return self._step, effects

    def _part(self, line: dict[str, Any]) -> PlannedStep:
        step = self._step
        step.batch.has_gone_on = line.get("has_gone_on", False)
        if "part" not in line:
            return step
        entries = {one.sequence_id: entry for entry, one in enumerate(step.sequences)}
        return step.only([entries[one] for one in line["part"]])

    # Inside: inputs that were not recorded.

    def _message(self, found: dict[str, Any]) -> Message:
        fields = dict(found)
        sequence_id = fields.pop("sequence_id", 0)
        message = _READER.read(fields)
        if isinstance(message, Submit):
            return replace(message, request=self._request(message.request, sequence_id))
        if isinstance(message, SendBlocks | FetchBlocks):
            return replace(message, block_hashes=self._tokens.made(message.block_hashes))
        if isinstance(message, Landed):
            return replace(message, commit=self._commit(message))
        return cast(Message, message)

    def _request(self, asked: Any, sequence_id: int) -> GenerationRequest:
        num_prompt = asked.num_prompt_tokens
        num_known = num_prompt + asked.num_output_tokens
        tokens = self._tokens.tokens(sequence_id, 0, num_known)
        if asked.is_unknown:
            tokens = (UNKNOWN_TOKEN, *tokens[1:])
        return GenerationRequest(
            id=asked.id,
            prompt_token_ids=tokens[:num_prompt],
            output_token_ids=tokens[num_prompt:],
            sampling=SamplingParams(
                max_tokens=asked.max_tokens,
                prompt_logprobs=asked.prompt_logprobs,
                grammar=_SOME_GRAMMAR if asked.has_grammar else None,
            ),
            deadline_s=asked.deadline_s,
            priority=asked.priority,
        )

    def _commit(self, landed: Landed) -> Commit:
        commit, attempt = landed.commit, self._flow.attempts.of_lease(landed.lease_token)
        if attempt is None or commit.first_token_id < 0:
            return commit
        known = commit.num_tokens
        (first,) = self._tokens.tokens(attempt.sequence.sequence_id, known, known + 1)
        return replace(commit, first_token_id=first)

    def _results(self, step: PlannedStep, line: dict[str, Any]) -> RunnerResult:
        counts = line.get("drawn") or step.batch.is_sampled.astype(int).tolist()
        ends, drafts, forced = (dict(line.get(one, ())) for one in ("ends", "drafts", "forced"))
        results: list[DrawnTokens | None] = []
        for entry, (sequence, count) in enumerate(zip(step.sequences, counts, strict=True)):
            if not count:
                results.append(None)
                continue
            tokens = self._drawn(sequence, count, ends.get(entry))
            proposed = (1,) * drafts.get(entry, 0)
            results.append(DrawnTokens(tokens, (), proposed, (1,) * forced.get(entry, 0)))
        scored = dict.fromkeys(line.get("scored", ()), _NO_LOGPROBS)
        return RunnerResult(
            results, scored, line.get("num_steps", 1), left_behind=line.get("left_behind", ())
        )

    def _drawn(self, sequence: Sequence, count: int, end: int | None) -> tuple[int, ...]:
        known = sequence.num_known
        tokens = list(self._tokens.tokens(sequence.sequence_id, known, known + count))
        if end is not None:
            tokens[end] = END_TOKEN
        return tuple(tokens)


def replay_steps(path: Path) -> Compared:
    """Make the recorded calls of a new flow; compare the result of each.

    Raises `ConfigError`, which names the line, for one that cannot be made.
    """
    header, _ = read_recording(path)
    try:
        calls = _calls_of(header)
    except _BAD_LINE as error:
        raise ConfigError(f"line 1: no node is made of it: {error!r}") from error
    return compare_steps(path, calls)


def _calls_of(header: dict[str, Any]) -> StepCalls:
    """Return the calls of a flow like the recorded one."""
    sections = {name: _READER.read(found) for name, found in header["config"].items()}
    config, facts = Config(**sections), _READER.read(header["model"])
    model = cast(LoadedModel, _ModelThen(facts))
    lease_tokens: deque[int] = deque()
    flow = flow_maker(config)(
        make_scheduler(config, model),
        model,
        Incarnation(header["node_id"], header["epoch"]),
        cast(NodeConnector, _ConnectorThen(header["kv_endpoint"])),
        lease_tokens.popleft,
    )
    return StepCalls(flow, facts.layout, lease_tokens)


def compare_steps(path: Path, calls: StepCalls) -> Compared:
    """Make the recorded calls; compare the result of each.

    Raises `ConfigError`, which names the line, for one that cannot be made.
    """
    _, lines = read_recording(path)
    calls.learn_hashes(path)
    compared = Compared()
    for number, line in lines:
        try:
            call = calls.call(line)
            if call is None:
                continue
        except _BAD_LINE as error:
            raise ConfigError(f"line {number}: no call is made of it: {error!r}") from error
        try:
            found = call()
        except Exception as raised:
            found = raised
        replayed, recorded = gave_json(line["call"], found), line.get("gave")
        compared.num_decisions += line["call"] == "begin_step"
        if replayed != recorded:
            compared.difference = Difference(
                line=number,
                at_s=line.get("at_s", 0.0),
                what=line["call"],
                recorded=json.dumps(recorded),
                replayed=json.dumps(replayed),
            )
            break
    return compared
