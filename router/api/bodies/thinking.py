"""Whether a chat asks the model to think, how hard, and for how many tokens at most.

The fields have a name for each server that clients were written for.
"""

from __future__ import annotations

from typing import Any

from common.errors import InvalidRequest
from router.api.bodies.schemas import ChatBody

THINKING_VARIABLES = ("enable_thinking", "thinking", "thinking_budget")
"""Variables of chat templates that say whether a model thinks."""
_BUDGETS = ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens")
"""The names that vLLM, Alibaba Cloud and llama.cpp have for the most tokens of thinking."""
_NO_BUDGET = -1


def thinking_budget(body: ChatBody) -> int | None:
    """Return the most tokens that a body lets the model think; None: it does not say.

    Raises `InvalidRequest` for what is no number of tokens.
    """
    for name, most in (
        *((name, getattr(body, name)) for name in _BUDGETS),
        ("thinking.budget_tokens", _part(body.thinking, "budget_tokens")),
        ("reasoning.max_tokens", _part(body.reasoning, "max_tokens")),
    ):
        if most is None or most == _NO_BUDGET:
            continue
        if isinstance(most, float) and most.is_integer():
            most = int(most)
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:
            shown = str(most)[:20]
            raise InvalidRequest(
                f"{name} is {shown}: wanted a number of tokens, or -1 for no limit", param=name
            )
        return most
    return None


def _part(field: Any, name: str) -> Any:
    return field.get(name) if isinstance(field, dict) else None


def effort_of(body: ChatBody) -> str | None:
    """Return how much to think. Raises `InvalidRequest` for what is no text."""
    effort = _part(body.reasoning, "effort")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequest(
            f"reasoning.effort is {str(effort)[:20]}: wanted text", param="reasoning.effort"
        )
    return effort if body.reasoning_effort is None else body.reasoning_effort


def _thinks(body: ChatBody) -> bool | None:
    """Return whether the model is to think; None: a body does not say.

    Raises `InvalidRequest` for what is no such value.
    """
    enabled = _flag_of_reasoning(body, "enabled")
    thinking = body.thinking
    if isinstance(thinking, dict):
        thinking = thinking.get("type") != "disabled"
    of_reasoning = body.reasoning if isinstance(body.reasoning, bool) else enabled
    asked = (body.enable_thinking, thinking, of_reasoning)
    return next((one for one in asked if one is not None), None)


def _flag_of_reasoning(body: ChatBody, name: str) -> bool | None:
    flag = _part(body.reasoning, name)
    if flag is not None and not isinstance(flag, bool):
        raise InvalidRequest(
            f"reasoning.{name} is {str(flag)[:20]}: wanted true or false", param=f"reasoning.{name}"
        )
    return flag


def hides_thinking(body: ChatBody) -> bool:
    """Return whether an answer is wanted without what the model thinks.

    Raises `InvalidRequest` for what is no such value.
    """
    return body.include_reasoning is False or _flag_of_reasoning(body, "exclude") is True


def thinking_variables(body: ChatBody) -> dict[str, bool | int]:
    """Return the variables by which chat templates let a model think or not, as a body asks for.

    `enable_thinking` is Qwen3's, `thinking` that of DeepSeek and Hermes 4, and `thinking_budget`
    that of Seed-OSS, which thinks where there is none. Fields of these names are those of the
    servers that their makers run, and `reasoning` is OpenRouter's.
    """
    thinks, budget = _thinks(body), thinking_budget(body)
    if thinks is False or (thinks is None and (budget == 0 or effort_of(body) == "none")):
        return {"enable_thinking": False, "thinking": False, "thinking_budget": 0}
    variables: dict[str, bool | int] = {}
    if thinks:
        variables = {"enable_thinking": True, "thinking": True}
    if budget is not None:
        variables["thinking_budget"] = budget
    return variables
