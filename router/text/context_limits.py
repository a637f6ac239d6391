"""The longest prompt and output that the cluster's context allows, and errors for longer ones."""

from __future__ import annotations

from common.errors import InvalidRequest


class ContextExceeded(InvalidRequest):
    """Prompt and output together are longer than the model and the nodes' caches allow."""

    code = "context_length_exceeded"


def output_limit(
    num_prompt_tokens: int,
    max_tokens: int | None,
    *,
    max_model_len: int,
    default: int | None,
    prompt_param: str,
    max_tokens_param: str,
) -> int:
    """Return the most tokens the answer may have.

    Without `max_tokens`: `default`, or all that is left when that is less or None. An explicit
    `max_tokens` that does not fit is refused rather than cut, with both numbers. Raises
    `InvalidRequest`, and `ContextExceeded`, also for a prompt that leaves no space for one token.
    """
    num_left = max_model_len - num_prompt_tokens
    if num_left < 1:
        raise ContextExceeded(
            f"the prompt has {num_prompt_tokens} tokens: at most {max_model_len} fit here, "
            "prompt and output together, and at least 1 token of output must fit",
            param=prompt_param,
        )
    if max_tokens is None:
        return num_left if default is None else min(default, num_left)
    if max_tokens < 1:
        raise InvalidRequest(
            f"{max_tokens_param} is {max_tokens}: wanted at least 1", param=max_tokens_param
        )
    if max_tokens > num_left:
        raise ContextExceeded(
            f"{max_tokens_param} is {max_tokens} and the prompt has {num_prompt_tokens} tokens: "
            f"{max_model_len} fit here, prompt and output together, so at most {num_left} are left",
            param=max_tokens_param,
        )
    return max_tokens
