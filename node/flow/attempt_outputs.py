"""What a node says in a router's stream about an attempt. Pure."""

from __future__ import annotations

from common.errors import PdserveError
from common.request import FinishReason, RequestOutput
from engine.core.step.step_in_flight import StepOutput
from node.flow.attempt_table import NodeAttempt
from node.flow.messages import SendOutput


def emit_tokens(attempt: NodeAttempt, output: StepOutput) -> SendOutput:
    """Return the tokens that a step drew, and note in the attempt whether they end it."""
    sequence = attempt.sequence
    queue_s, compute_s = (0.0, 0.0) if output.first_index else attempt.prompt_spans_s()
    if output.finish_reason is not None:
        attempt.outcome = output.finish_reason.value
    return SendOutput(
        attempt.router,
        RequestOutput(
            id=attempt.id,
            first_index=output.first_index,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            num_cached_tokens=sequence.num_cached_tokens,
            num_drafted=sequence.num_drafted,
            num_accepted=sequence.num_accepted_drafts,
            queue_s=queue_s,
            compute_s=compute_s,
            finish_reason=output.finish_reason,
            prompt_logprobs=output.prompt_logprobs,
        ),
    )


def emit_error(attempt: NodeAttempt, error: PdserveError) -> SendOutput:
    """Return the end of an attempt that failed."""
    return SendOutput(
        attempt.router,
        RequestOutput(
            id=attempt.id,
            finish_reason=FinishReason.ERROR,
            error_code=error.code,
            error_message=str(error),
        ),
    )
