"""What a node says to a router about an attempt. Pure."""

from __future__ import annotations

from common.errors import PdserveError
from common.request import NO_DETAILS, FinishReason, OutputDetails, RequestCounts, RequestOutput
from engine.core.scheduler import Scheduler
from engine.core.step.step_results import StepOutput
from node.flow.attempts.attempt_table import NodeAttempt
from node.flow.messages import AnswerCall, CallRefused, SendOutput, Submit

RETRY_AFTER_S = 1.0


def emit_tokens(attempt: NodeAttempt, output: StepOutput) -> SendOutput:
    """Return the tokens that a step drew, and note in the attempt whether they end it."""
    details = NO_DETAILS
    if not output.first_index or output.finish_reason is not None or output.logprobs:
        queue_s, compute_s = (0.0, 0.0) if output.first_index else attempt.prompt_spans_s()
        details = OutputDetails(
            logprobs=output.logprobs,
            queue_s=queue_s,
            compute_s=compute_s,
            finish_reason=output.finish_reason,
            prompt_logprobs=output.prompt_logprobs,
        )
    if output.finish_reason is not None:
        attempt.outcome = output.finish_reason.value
    return SendOutput(
        attempt.router,
        RequestOutput(
            attempt.id, output.first_index, output.token_ids, False, new_counts(attempt), details
        ),
    )


def new_counts(attempt: NodeAttempt) -> RequestCounts | None:
    """Return what is counted for an attempt, and note that it was sent; None where it was."""
    sequence = attempt.sequence
    counts = RequestCounts(
        sequence.num_cached_tokens, sequence.num_drafted, sequence.num_accepted_drafts
    )
    if counts == attempt.sent_counts:
        return None
    attempt.sent_counts = counts
    return counts


def emit_error(attempt: NodeAttempt, error: PdserveError) -> SendOutput:
    """Return the end of an attempt that failed."""
    return SendOutput(
        attempt.router,
        RequestOutput(
            id=attempt.id,
            details=OutputDetails(
                finish_reason=FinishReason.ERROR, error_code=error.code, error_message=str(error)
            ),
        ),
    )


def refused(scheduler: Scheduler, message: Submit, error: PdserveError) -> AnswerCall:
    """Return the refusal of a request, with the room that the node has."""
    pool = scheduler.pool
    refusal = CallRefused(error, pool.num_available, max(scheduler.num_free_seats, 0))
    return AnswerCall(message.reply_to, refusal)
