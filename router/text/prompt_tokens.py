"""Log probabilities of a prompt's own tokens, as entries of its echo."""

from __future__ import annotations

from collections.abc import Sequence

from common.prompt_logprobs import PromptLogprobs
from common.request import TokenLogprobs
from router.text.choice_text import LogprobEntry


def echoed_entries(
    token_ids: Sequence[int],
    text_offsets: Sequence[int],
    num_top: int,
    found: PromptLogprobs | None,
) -> tuple[LogprobEntry, ...]:
    """Return the entries of a prompt that is shown; nothing is known of its first token.

    `text_offsets` is where each token's text starts. `found` is None for a prompt of one token.
    """
    entries = [LogprobEntry(token_ids[0], None, text_offsets[0], is_echo=True)]
    for place in range(0 if found is None else len(found)):
        assert found is not None
        own = TokenLogprobs(found.logprobs[place], found.top(place, num_top))
        token_id, offset = token_ids[place + 1], text_offsets[place + 1]
        entries.append(LogprobEntry(token_id, own, offset, is_echo=True))
    return tuple(entries)
