"""What the effects of a request flow change in the books of the nodes it asks. No I/O."""

from __future__ import annotations

from router.core.effects import LegClosed, PromptComputed, PromptKept, SendPrefill, SendReserve
from router.core.membership import Membership

CountedEffect = SendReserve | SendPrefill | PromptKept | PromptComputed | LegClosed


def count_legs(members: Membership, effect: CountedEffect, num_prompt_tokens: int) -> None:
    """Count the legs that an effect opens or closes, and the prompt where it is computed."""
    match effect:
        case SendReserve(node, prefill=prefill):
            members.on_leg_opened(node, num_prompt_tokens if prefill is None else 0)
            if prefill is not None:
                members.on_leg_opened(prefill, num_prompt_tokens)
        case SendPrefill(node, is_counted=is_counted):
            if not is_counted:
                members.on_leg_opened(node, num_prompt_tokens)
        case PromptKept(node):
            members.on_leg_closed(node, 0)
            members.on_leg_opened(node, num_prompt_tokens)
        case PromptComputed(node):
            members.on_prompt_computed(node, num_prompt_tokens)
        case LegClosed(node, has_prompt):
            members.on_leg_closed(node, num_prompt_tokens if has_prompt else 0)
