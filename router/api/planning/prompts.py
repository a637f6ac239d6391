"""Prompts of requests as token ids."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NamedTuple

from common.errors import InvalidRequest
from router.api.bodies.asked import AskedTexts
from router.api.planning.output import MAX_CHOICES
from router.text.text_model import TextModel


class Prompt(NamedTuple):
    """A prompt. `text` is None unless the client gave that text."""

    token_ids: tuple[int, ...]
    text: str | None = None


class Prompts:
    """Makes prompts for one model, of which a text has no more than `max_model_len` tokens."""

    def __init__(self, text_model: TextModel, max_model_len: int) -> None:
        self._model = text_model
        self._max_model_len = max_model_len

    def of_texts(self, texts: AskedTexts, most_tokens: int | None) -> list[Prompt]:
        """Return the prompts of text, several texts, token ids, or several lists of token ids.

        Of each the last `most_tokens` are kept; None: all. Raises `InvalidRequest` for what is none
        of these, and for a text without tokens, and `ContextExceeded`.
        """
        prompt = texts.prompt
        of_text = partial(
            self._of_text,
            most_tokens=most_tokens,
            add_special_tokens=texts.adds_special_tokens,
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
        lists = prompt if all(isinstance(part, list) for part in prompt) else [prompt]
        return [self._of_ids(ids, most_tokens) for ids in lists]

    def of_chat(self, text: str, most_tokens: int | None) -> Prompt:
        """Return the prompt that a chat's template made, as `of_texts` does."""
        return self._of_text(
            text, most_tokens, add_special_tokens=False, is_plain=False, param="messages"
        )

    def _of_text(
        self,
        text: str,
        most_tokens: int | None,
        *,
        add_special_tokens: bool,
        is_plain: bool,
        param: str,
    ) -> Prompt:
        """Return one text; one that `is_plain` is as the client wrote it."""
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
        return Prompt(token_ids=token_ids, text=text if len(token_ids) == num_encoded else None)

    def _of_ids(self, ids: list[Any], most_tokens: int | None) -> Prompt:
        if not ids:
            raise InvalidRequest("prompt is empty: wanted text or token ids", param="prompt")
        if most_tokens is not None:
            ids = ids[-most_tokens:]
        self._model.check_ids(ids, "prompt")
        return Prompt(token_ids=tuple(ids))

    def echo(self, prompt: Prompt, *, has_offsets: bool) -> tuple[str, tuple[int, ...]]:
        """Return a prompt as text, and where the text of each token starts in it, if asked for."""
        text = self._model.decode(prompt.token_ids) if prompt.text is None else prompt.text
        return text, self._text_offsets(prompt, text) if has_offsets else ()

    def _text_offsets(self, prompt: Prompt, text: str) -> tuple[int, ...]:
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


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
