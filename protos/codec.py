"""Messages to values and back.

A malformed value of a router is an `InvalidRequest`, because clients' requests are passed on. A
malformed answer of a node is a `PeerProtocolError`. Tickets are not translated here: a router
passes them on unread, and the nodes decode them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.errors import InvalidRequest, Overloaded, PdserveError, PeerProtocolError, StaleEpoch
from common.errors import error_from_code as _error_from_code
from common.grammar import Grammar, GrammarKind
from common.ids import AttemptId, Incarnation
from common.kv.prefix_source import PrefixSource
from common.observing.tracing import is_traceparent
from common.request import GenerationRequest, SamplingParams
from common.token_rules import NO_RULES, ThinkingBudget, TokenRules
from common.version import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from protos import pdserve_node_pb2 as pb

MAX_ID_LENGTH = 128
MAX_ERROR_LENGTH = 1000
_MAX_UINT32 = 2**32 - 1


def make_envelope(
    sender: Incarnation, receiver: Incarnation, protocol: int = PROTOCOL_VERSION
) -> pb.Envelope:
    """Return the envelope of a message with its two ends.

    `protocol` is the receiver's version: the envelope has it where it is older than this one's.
    """
    return pb.Envelope(
        protocol_version=min(protocol, PROTOCOL_VERSION),
        sender_id=sender.node_id,
        sender_epoch=sender.epoch,
        receiver_id=receiver.node_id,
        receiver_epoch=receiver.epoch,
    )


def check_envelope(envelope: pb.Envelope, receiver: Incarnation) -> Incarnation:
    """Return the sender of a message that is for `receiver`.

    Raises `PeerProtocolError` for a protocol version that is neither this one nor the one before,
    or a sender without a name, and `StaleEpoch` when the message is for another node or another
    incarnation of this one.
    """
    if not OLDEST_PROTOCOL_VERSION <= envelope.protocol_version <= PROTOCOL_VERSION:
        raise PeerProtocolError(
            f"protocol version is {envelope.protocol_version}: wanted {OLDEST_PROTOCOL_VERSION} "
            f"or {PROTOCOL_VERSION}"
        )
    if not 0 < len(envelope.sender_id) <= MAX_ID_LENGTH:
        raise PeerProtocolError(
            f"sender_id has {len(envelope.sender_id)} characters: wanted 1 to {MAX_ID_LENGTH}"
        )
    named = Incarnation(envelope.receiver_id[:MAX_ID_LENGTH], envelope.receiver_epoch)
    if named != receiver:
        raise StaleEpoch(f"the message is for {named}, this is {receiver}")
    return Incarnation(envelope.sender_id, envelope.sender_epoch)


def sampling_to_proto(
    params: SamplingParams, message: pb.SamplingParams | None = None
) -> pb.SamplingParams:
    """Return the message: `message`, an empty part of a larger one, where it is given.

    Raises `InvalidRequest` for a number that the wire's integers cannot hold.
    """
    message = pb.SamplingParams() if message is None else message
    try:
        message.max_tokens = params.max_tokens
        message.temperature = params.temperature
        message.top_k = params.top_k
        message.top_p = params.top_p
        message.min_p = params.min_p
        message.repetition_penalty = params.repetition_penalty
        message.presence_penalty = params.presence_penalty
        message.frequency_penalty = params.frequency_penalty
        message.seed = params.seed
        message.stop_token_ids.extend(params.stop_token_ids)
        message.ignore_eos = params.ignore_eos
        message.min_tokens = params.min_tokens
    except (ValueError, TypeError, OverflowError) as wrong:
        raise InvalidRequest(f"sampling parameters do not fit the wire: {wrong}") from wrong
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    if params.prompt_logprobs is not None:
        message.prompt_logprobs = params.prompt_logprobs
    if params.grammar is not None:
        message.grammar.kind = params.grammar.kind.value
        message.grammar.text = params.grammar.text
    if params.rules != NO_RULES:
        _write_rules(params.rules, message.rules)
    return message


def _write_rules(rules: TokenRules, message: pb.TokenRules) -> None:
    try:
        message.biased_token_ids.extend(token_id for token_id, _ in rules.biases)
        message.biases.extend(bias for _, bias in rules.biases)
        message.allowed_token_ids.extend(rules.allowed_token_ids)
        for word in rules.bad_words:
            message.bad_words.add(ids=word)
        if rules.thinking is not None:
            message.thinking.num_tokens = rules.thinking.num_tokens
            message.thinking.end_token_id = rules.thinking.end_token_id
            message.thinking.begin_token_ids.extend(rules.thinking.begin_token_ids)
    except (ValueError, TypeError, OverflowError) as wrong:
        raise InvalidRequest(f"rules about tokens do not fit the wire: {wrong}") from wrong


def _rules_from_proto(message: pb.TokenRules) -> TokenRules:
    if len(message.biased_token_ids) != len(message.biases):
        raise InvalidRequest(
            f"{len(message.biases)} biases of {len(message.biased_token_ids)} tokens: wanted one "
            "of each",
            param="logit_bias",
        )
    return TokenRules(
        biases=tuple(zip(message.biased_token_ids, message.biases, strict=True)),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        allowed_token_ids=tuple(message.allowed_token_ids),
        thinking=_budget_from_proto(message.thinking) if message.HasField("thinking") else None,
    )


def _budget_from_proto(message: pb.ThinkingBudget) -> ThinkingBudget:
    return ThinkingBudget(
        num_tokens=message.num_tokens,
        end_token_id=message.end_token_id,
        begin_token_ids=tuple(message.begin_token_ids),
    )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Return the parameters; `InvalidRequest` names the field that is out of range."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=(message.prompt_logprobs if message.HasField("prompt_logprobs") else None),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        grammar=_grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
        rules=_rules_from_proto(message.rules) if message.HasField("rules") else NO_RULES,
    )


def _grammar_from_proto(message: pb.Grammar) -> Grammar:
    try:
        kind = GrammarKind(message.kind)
    except ValueError:
        wanted = ", ".join(kind.value for kind in GrammarKind)
        raise InvalidRequest(
            f"the kind of a grammar is {message.kind[:MAX_ID_LENGTH]!r}: wanted {wanted}"
        ) from None
    return Grammar(kind, message.text)


def request_to_proto(
    request: GenerationRequest, message: pb.GenerationRequest | None = None
) -> pb.GenerationRequest:
    """Return the message: `message`, an empty part of a larger one, where it is given. To put a
    long prompt into the larger one afterwards would be to copy it.

    Raises `InvalidRequest` for a number that the wire's integers cannot hold.
    """
    message = pb.GenerationRequest() if message is None else message
    sampling_to_proto(request.sampling, message.sampling)
    try:
        message.request_id, message.attempt = request.id
        message.prompt_token_ids.extend(request.prompt_token_ids)
        message.deadline_ms = to_ms(request.deadline_s)
        message.priority = request.priority
        message.output_token_ids.extend(request.output_token_ids)
        message.traceparent = request.traceparent
        message.cache_salt = request.cache_salt
    except (ValueError, TypeError, OverflowError) as wrong:
        raise InvalidRequest(f"the request does not fit the wire: {wrong}") from wrong
    return message


def request_from_proto(message: pb.GenerationRequest) -> GenerationRequest:
    """Return the request.

    Raises `InvalidRequest` for a missing id, an empty prompt, no deadline, bad sampling, a priority
    out of range, an answer that is complete already, or a malformed `traceparent`.
    """
    if message.traceparent and not is_traceparent(message.traceparent):
        raise InvalidRequest(
            f"traceparent has {len(message.traceparent)} characters and is none: wanted W3C Trace "
            "Context, or nothing"
        )
    if not message.prompt_token_ids:
        raise InvalidRequest("the prompt is empty: wanted at least 1 token", param="prompt")
    if message.deadline_ms == 0:
        raise InvalidRequest("deadline_ms is 0: wanted the milliseconds that are left")
    return GenerationRequest(
        id=attempt_from_proto(message.request_id, message.attempt),
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        deadline_s=message.deadline_ms / 1000,
        priority=message.priority,
        output_token_ids=tuple(message.output_token_ids),
        traceparent=message.traceparent,
        cache_salt=message.cache_salt,
    )


def attempt_from_proto(choice_id: str, attempt: int) -> AttemptId:
    """Return the attempt; `InvalidRequest` for an id of the wrong length or an attempt below 1."""
    if not 0 < len(choice_id) <= MAX_ID_LENGTH:
        raise InvalidRequest(
            f"request_id has {len(choice_id)} characters: wanted 1 to {MAX_ID_LENGTH}"
        )
    if attempt < 1:
        raise InvalidRequest(f"attempt is {attempt}: wanted at least 1")
    return AttemptId(choice_id, attempt)


def attempts_to_proto(attempts: Sequence[AttemptId]) -> pb.Attempts:
    """Return attempts as two columns."""
    return pb.Attempts(
        request_ids=[attempt.choice_id for attempt in attempts],
        attempts=[attempt.attempt for attempt in attempts],
    )


def attempts_from_proto(message: pb.Attempts) -> tuple[AttemptId, ...]:
    """Return attempts; `InvalidRequest` for unequal columns or a malformed attempt."""
    num_ids, num_attempts = len(message.request_ids), len(message.attempts)
    if num_ids != num_attempts:
        raise InvalidRequest(f"{num_ids} request ids with {num_attempts} attempts: wanted as many")
    return tuple(map(attempt_from_proto, message.request_ids, message.attempts))


def source_to_proto(source: PrefixSource) -> pb.PrefixSource:
    """Return who has the start of a prompt, as a message."""
    node = source.node
    return pb.PrefixSource(
        node_id=node.node_id,
        epoch=node.epoch,
        num_tokens=source.num_tokens,
        num_disk_tokens=source.num_disk_tokens,
        num_queued_tokens=source.num_queued_tokens,
    )


def source_from_proto(source: pb.PrefixSource) -> PrefixSource:
    """Return who has the start of a prompt. Raises `InvalidRequest` for one without a name."""
    if not 0 < len(source.node_id) <= MAX_ID_LENGTH:
        raise InvalidRequest(f"the source's node_id has {len(source.node_id)} characters")
    return PrefixSource(
        Incarnation(source.node_id, source.epoch),
        source.num_tokens,
        source.num_disk_tokens,
        source.num_queued_tokens,
    )


def refusal_to_proto(
    error: PdserveError, *, free_blocks: int = 0, free_seats: int = 0
) -> pb.Refusal:
    """Return a node's refusal, with its free blocks and seats for diagnosis."""
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
    return pb.Refusal(
        code=error.code,
        message=str(error)[:MAX_ERROR_LENGTH],
        retry_after_ms=to_ms(retry_after_s) if retry_after_s else 0,
        free_blocks=free_blocks,
        free_seats=free_seats,
    )


def refusal_to_error(refusal: pb.Refusal) -> PdserveError:
    """Return the typed error of a refusal; an unknown code is an `InternalError`."""
    message = refusal.message[:MAX_ERROR_LENGTH]
    error = _error_from_code(refusal.code, message)
    if isinstance(error, Overloaded):
        error.retry_after_s = refusal.retry_after_ms / 1000
    return error


def to_ms(span_s: float) -> int:
    """Return a span in whole milliseconds, rounded up, at least 1: 0 on the wire means not set."""
    if not span_s < _MAX_UINT32 / 1000:
        return _MAX_UINT32
    return max(1, math.ceil(span_s * 1000))
