"""Prompts of requests as token ids that leave room for an answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.errors import InvalidRequest
from router.api.bodies.checked_fields import MAX_CHOICES
from router.text.context_limits import prompt_too_long
from router.text.text_model import TextModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt that leaves room for an answer. `text` is None unless the client gave that text."""

    token_ids: tuple[int, ...]
    text: str | None = None


class Prompts:
    """Makes prompts for one model, with room for at most `max_model_len` tokens in all."""

    def __init__(self, text_model: TextModel, max_model_len: int) -> None:
        self._model = text_model
        self._max_model_len = max_model_len

    def of_body(
        self, prompt: str | list[Any], most_tokens: int | None, *, add_special_tokens: bool
    ) -> list[Prompt]:
        """Return the prompts of text, several texts, token ids, or several lists of token ids.

        Raises `InvalidRequest` for what is none of these, and as `of_text` does.
        """
        of_text = partial(
            self.of_text,
            most_tokens=most_tokens,
            add_special_tokens=add_special_tokens,
            is_plain=True,
            param="prompt",
        )
        if isinstance(prompt, str):
            return [of_text(prompt)]
        if not prompt:
            raise InvalidRequest("prompt is empty: wanted text or token ids", param="prompt")
        if len(prompt) > MAX_CHOICES and not _is_int(prompt[0]):
            raise InvalidRequest(
                f"prompt lists {len(prompt)} prompts: wanted at most {MAX_CHOICES}", param="prompt"
            )
        if all(isinstance(part, str) for part in prompt):
            return [of_text(text) for text in prompt]
        if all(isinstance(part, list) for part in prompt):
            return [self._of_ids(ids, most_tokens) for ids in prompt]
        return [self._of_ids(prompt, most_tokens)]

    def of_text(
        self,
        text: str,
        most_tokens: int | None,
        *,
        add_special_tokens: bool,
        is_plain: bool,
        param: str,
    ) -> Prompt:
        """Return one text as a prompt; of more than `most_tokens` it keeps the last ones.

        A text that `is_plain` is as the client wrote it; any other one is of a chat's template.

        Raises `InvalidRequest` for a text without tokens, or with more than fit.
        """
        if not text:
            raise InvalidRequest(f"{param} is empty: wanted some text", param=param)
        token_ids = self._model.encode(
            text,
            add_special_tokens=add_special_tokens,
            is_plain=is_plain,
            param=param,
            max_model_len=self._max_model_len if most_tokens is None else sys.maxsize,
        )
        if not token_ids:
            raise InvalidRequest(f"{param} has no tokens: wanted some text", param=param)
        num_encoded = len(token_ids)
        if most_tokens is not None:
            token_ids = token_ids[-most_tokens:]
        if len(token_ids) >= self._max_model_len:
            raise prompt_too_long(len(token_ids), self._max_model_len, param=param)
        return Prompt(token_ids=token_ids, text=text if len(token_ids) == num_encoded else None)

    def _of_ids(self, ids: list[Any], most_tokens: int | None) -> Prompt:
        if not ids:
            raise InvalidRequest("prompt is empty: wanted text or token ids", param="prompt")
        if most_tokens is not None:
            ids = ids[-most_tokens:]
        if len(ids) >= self._max_model_len:
            raise prompt_too_long(len(ids), self._max_model_len, param="prompt")
        check_token_ids(ids, "prompt", self._model.vocab_size)
        return Prompt(token_ids=tuple(ids))

    def text_offsets(self, prompt: Prompt, text: str) -> tuple[int, ...]:
        """Return where the text of each token starts in `text`, which the prompt is shown as.

        A token without text of its own has the place of the next one. Special tokens have a text
        where the client wrote it.
        """
        decoder, end, offsets = self._model.new_detokenizer(), 0, []
        for token_id in prompt.token_ids:
            offsets.append(min(end, len(text)))
            shown = decoder.push(token_id)
            if not shown and prompt.text is not None and not decoder.has_pending:
                written = self._model.describe_token(token_id).text
                shown = written if text.startswith(written, end) else ""
            end += len(shown)
        return tuple(offsets)

    def shown(self, prompt: Prompt) -> str:
        """Return the text of a prompt that is shown before its answer."""
        return self._model.decode(prompt.token_ids) if prompt.text is None else prompt.text


def check_token_ids(ids: Sequence[Any], param: str, vocab_size: int) -> None:
    """Raise `InvalidRequest` for what is no token id of the vocabulary."""
    for token_id in ids:
        if not _is_int(token_id):
            raise InvalidRequest(
                f"{param} holds a {type(token_id).__name__} among token ids: wanted text, "
                "texts, token ids or lists of token ids",
                param=param,
            )
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param} holds token id {token_id}: this model has ids 0 to {vocab_size - 1}",
                param=param,
            )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
