"""The longest prompt and output that the cluster's context allows, and errors for longer ones.

Agents shorten a conversation and go on when an error has words that they know. Those of Anthropic,
`prompt is too long`, and of OpenAI and vLLM, `maximum context length is … tokens`, are known most.
"""

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
    min_tokens: int,
) -> int:
    """Return the most tokens the answer may have.

    Without `max_tokens`: `default`, or all that is left when that is less or None. More than is
    left is cut to that: agents send one limit with every conversation. Raises `InvalidRequest`,
    and `ContextExceeded` for a prompt that leaves no space for one token, or for `min_tokens`.
    """
    num_left = max_model_len - num_prompt_tokens
    if num_left < 1:
        raise ContextExceeded(
            f"prompt is too long: {num_prompt_tokens} tokens > {max_model_len - 1} maximum: "
            f"{context_length(max_model_len)}, prompt and output together, and at least 1 token of "
            "output must fit",
            param=prompt_param,
        )
    if min_tokens > num_left:
        raise ContextExceeded(
            f"min_tokens is {min_tokens} and the prompt has {num_prompt_tokens} tokens: "
            f"{context_length(max_model_len)}, prompt and output together, so at most {num_left} "
            "are left",
            param="min_tokens",
        )
    if max_tokens is None:
        return num_left if default is None else min(default, num_left)
    if max_tokens < 1:
        raise InvalidRequest(
            f"{max_tokens_param} is {max_tokens}: wanted at least 1", param=max_tokens_param
        )
    return min(max_tokens, num_left)


def context_length(max_model_len: int) -> str:
    """Return how long prompt and output may be, in the words that agents know."""
    return f"the maximum context length is {max_model_len} tokens here"
