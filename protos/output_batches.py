"""Outputs of many requests as columns of one message, and back.

A router reads one of these for every step of every node, with an output for each token that it
serves. Columns are read as whole lists; single messages would be read field by field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, repeat
from operator import gt
from typing import TypeVar

from common.errors import PeerProtocolError
from common.ids import AttemptId
from common.prompt_logprobs import PromptLogprobs
from common.request import (
    MAX_LOGPROBS,
    NO_COUNTS,
    NO_DETAILS,
    FinishReason,
    OutputDetails,
    RequestCounts,
    RequestOutput,
    TokenLogprobs,
)
from protos import pdserve_node_pb2 as pb
from protos.codec import MAX_ERROR_LENGTH, MAX_ID_LENGTH

_Number = TypeVar("_Number", bool, int)

# `_make` without its check of the length, which takes longer than the rest.
_new_attempt: Callable[[Iterable[object]], AttemptId] = partial(tuple.__new__, AttemptId)
_new_output: Callable[[Iterable[object]], RequestOutput] = partial(tuple.__new__, RequestOutput)


def outputs_to_proto(outputs: Sequence[RequestOutput]) -> pb.OutputBatch:
    """Return a node's outputs as one message; log probabilities are 32-bit floats."""
    counts = [output.counts or NO_COUNTS for output in outputs]
    return pb.OutputBatch(
        request_ids=[output.id.choice_id for output in outputs],
        attempts=[output.id.attempt for output in outputs],
        first_indexes=[output.first_index for output in outputs],
        num_tokens=[len(output.token_ids) for output in outputs],
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        is_started=_unless_zero([output.is_started for output in outputs]),
        num_cached_tokens=_unless_zero([one.num_cached_tokens for one in counts]),
        num_drafted=_unless_zero([one.num_drafted for one in counts]),
        num_accepted=_unless_zero([one.num_accepted for one in counts]),
        details=[
            _details_to_proto(index, output.details)
            for index, output in enumerate(outputs)
            if output.details != NO_DETAILS
        ],
    )


def outputs_from_proto(batch: pb.OutputBatch) -> list[RequestOutput]:
    """Return the outputs; `PeerProtocolError` for a batch that no node of this protocol sends."""
    choice_ids, attempts = list(batch.request_ids), list(batch.attempts)
    firsts, counts = list(batch.first_indexes), list(batch.num_tokens)
    num_outputs = len(choice_ids)
    if not len(attempts) == len(firsts) == len(counts) == num_outputs:
        raise PeerProtocolError("malformed outputs: columns of different lengths")
    if num_outputs and not (
        0 < min(map(len, choice_ids)) <= max(map(len, choice_ids)) <= MAX_ID_LENGTH
        and min(attempts) > 0
    ):
        raise PeerProtocolError("malformed outputs: an attempt without a name or a number")
    outputs = list(
        # All at once, because there is one for each token; rare fields are added below.
        map(
            _new_output,
            zip(
                map(_new_attempt, zip(choice_ids, attempts, strict=True)),
                firsts,
                _cut(tuple(batch.token_ids), counts),
                _column(batch.is_started, num_outputs, False),
                _counts(batch, num_outputs),
                repeat(NO_DETAILS),
            ),
        )
    )
    for details in batch.details:
        if details.place >= num_outputs:
            raise PeerProtocolError(f"malformed outputs: no output {details.place}")
        output = outputs[details.place]
        outputs[details.place] = output._replace(details=_details_from_proto(output, details))
    return outputs


def _counts(batch: pb.OutputBatch, num_outputs: int) -> Iterable[RequestCounts | None]:
    if not (batch.num_cached_tokens or batch.num_drafted or batch.num_accepted):
        return repeat(None)
    cached = _column(batch.num_cached_tokens, num_outputs, 0)
    drafted = _column(batch.num_drafted, num_outputs, 0)
    accepted = _column(batch.num_accepted, num_outputs, 0)
    if any(map(gt, accepted, drafted)):
        raise PeerProtocolError("malformed outputs: more drafts were accepted than there were")
    columns = zip(cached, drafted, accepted, strict=True)
    return [RequestCounts(*counts) if any(counts) else None for counts in columns]


def _unless_zero(column: list[_Number]) -> list[_Number]:
    return column if any(column) else []


def _column(values: Sequence[_Number], num_outputs: int, unsaid: _Number) -> list[_Number]:
    if not values:
        return [unsaid] * num_outputs
    if len(values) != num_outputs:
        raise PeerProtocolError("malformed outputs: columns of different lengths")
    return list(values)


def _cut(token_ids: tuple[int, ...], counts: list[int]) -> Iterable[tuple[int, ...]]:
    if counts.count(1) == len(counts) == len(token_ids):  # almost always: one token each
        return zip(token_ids, strict=True)
    ends = list(accumulate(counts))
    if (ends[-1] if ends else 0) != len(token_ids):
        raise PeerProtocolError(f"malformed outputs: {len(token_ids)} tokens, not {sum(counts)}")
    return [token_ids[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _details_to_proto(index: int, details: OutputDetails) -> pb.OutputDetails:
    return pb.OutputDetails(
        place=index,
        logprobs=[_logprobs_to_proto(entry) for entry in details.logprobs],
        queue_us=round(details.queue_s * 1e6),
        compute_us=round(details.compute_s * 1e6),
        finish_reason="" if details.finish_reason is None else details.finish_reason.value,
        error_code=details.error_code,
        error_message=details.error_message[:MAX_ERROR_LENGTH],
        prompt_logprobs=_prompt_logprobs_to_proto(details.prompt_logprobs),
    )


def _details_from_proto(output: RequestOutput, details: pb.OutputDetails) -> OutputDetails:
    reason, logprobs = details.finish_reason, details.logprobs
    try:
        finish = FinishReason(reason) if reason else None
    except ValueError as wrong:
        raise PeerProtocolError(f"malformed output of {output.id}: {wrong}") from wrong
    if logprobs and len(logprobs) != len(output.token_ids):
        raise PeerProtocolError(
            f"output of {output.id} has {len(logprobs)} logprobs for {len(output.token_ids)} tokens"
        )
    if finish is FinishReason.ERROR and not details.error_code:
        raise PeerProtocolError(f"output of {output.id} ends in an error without a code")
    return OutputDetails(
        logprobs=tuple([_logprobs_from_proto(entry) for entry in logprobs]),
        queue_s=details.queue_us / 1e6,
        compute_s=details.compute_us / 1e6,
        finish_reason=finish,
        error_code=details.error_code,
        error_message=details.error_message[:MAX_ERROR_LENGTH],
        prompt_logprobs=(
            _prompt_logprobs_from_proto(details.prompt_logprobs)
            if details.HasField("prompt_logprobs")
            else None
        ),
    )


def _prompt_logprobs_to_proto(found: PromptLogprobs | None) -> pb.PromptLogprobs | None:
    if found is None:
        return None
    return pb.PromptLogprobs(
        num_top=found.num_top,
        logprobs=found.logprobs,
        ranks=found.ranks,
        top_token_ids=found.top_token_ids,
        top_logprobs=found.top_logprobs,
    )


def _prompt_logprobs_from_proto(message: pb.PromptLogprobs) -> PromptLogprobs:
    found = PromptLogprobs(
        message.num_top,
        tuple(message.logprobs),
        tuple(message.ranks),
        tuple(message.top_token_ids),
        tuple(message.top_logprobs),
    )
    if not found.is_well_formed or found.num_top > MAX_LOGPROBS:
        raise PeerProtocolError(
            f"malformed logprobs of a prompt: {len(found.ranks)} ranks and "
            f"{len(found.top_token_ids)} and {len(found.top_logprobs)} top tokens for {len(found)} "
            f"tokens with {found.num_top} each: wanted equal counts, at most {MAX_LOGPROBS} each"
        )
    return found


def _logprobs_to_proto(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=entry.logprob,
        top_token_ids=[token_id for token_id, _ in entry.top],
        top_logprobs=[logprob for _, logprob in entry.top],
    )


def _logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs:
    num_top = len(message.top_token_ids)
    if num_top != len(message.top_logprobs) or num_top > MAX_LOGPROBS:
        raise PeerProtocolError(
            f"{num_top} top tokens with {len(message.top_logprobs)} logprobs: "
            f"wanted equal counts, at most {MAX_LOGPROBS}"
        )
    return TokenLogprobs(
        message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    )
