"""The corpus: messages that the model writes itself, and its greedy answers with hidden states."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tqdm import tqdm

from tools.mtp_training.prompt_bank import (
    OPENINGS,
    Message,
    Prompt,
    bank,
    follow_up,
    interleave,
    self_written,
)
from tools.mtp_training.target_model import MAX_SEQUENCE, Sequence, TargetModel, greedy, sampled
from tools.mtp_training.work_folder import Conversation, WorkFolder

MAX_ANSWER = 256
_MAX_PROMPT = MAX_SEQUENCE - MAX_ANSWER
_MAX_MESSAGE = 96
_MIN_MESSAGE_CHARS = 8
_CONVERSATIONS_PER_FILE = 48
_TEMPERATURE, _TOP_K = 1.0, 50
_MARK = "\x00user message\x00"


def write_messages(model: TargetModel, work: WorkFolder, count: int, seed: int) -> list[str]:
    """Generate `count` user messages with the model, or read those of an earlier start."""
    kept = work.read_json("messages.json")
    if kept is not None:
        return [str(text) for text in kept]
    before = model.text.render_chat([{"role": "user", "content": _MARK}]).split(_MARK)[0]

    def pending() -> Iterator[Sequence]:
        for i in range(count):
            opening = OPENINGS[i % len(OPENINGS)]
            tokens = _encode(model, before + opening)
            start = len(_encode(model, before))
            yield Sequence(str(i), tokens, start, start + _MAX_MESSAGE)

    texts: dict[str, None] = {}
    with tqdm(total=count, desc="user messages", unit="message") as bar:
        for sequence in model.decode(pending(), sampled(seed, _TEMPERATURE, _TOP_K)):
            bar.update()
            if sequence.token_ids[-1] in model.text.eos_token_ids:
                text = model.text.decode(sequence.token_ids[sequence.prompt_len :]).strip()
                if len(text) >= _MIN_MESSAGE_CHARS:
                    texts[text] = None
    work.write_json("messages.json", list(texts))
    return list(texts)


def write_answers(
    model: TargetModel, work: WorkFolder, messages: list[str], answer_tokens: int, seed: int
) -> None:
    """Answer prompts greedily until the work folder holds `answer_tokens` tokens of answers."""
    done = work.conversations()
    queue = _Queue(model, interleave(bank(seed), self_written(messages)), seed)
    total = 0
    for conversation in done:
        total += len(conversation.token_ids) - conversation.prompt_len
        queue.finished(conversation)
    del done  # their hidden states are some hundred megabytes
    if total >= answer_tokens:
        return
    unsaved: list[Conversation] = []
    with tqdm(total=answer_tokens, initial=total, desc="answers", unit="token") as bar:
        for sequence in model.decode(queue.pending(), greedy):
            conversation = Conversation(
                sequence.key,
                np.array(sequence.token_ids, np.int32),
                sequence.prompt_len,
                sequence.all_states(),
            )
            queue.finished(conversation)
            unsaved.append(conversation)
            num_tokens = len(conversation.token_ids) - conversation.prompt_len
            total += num_tokens
            bar.update(num_tokens)
            if len(unsaved) == _CONVERSATIONS_PER_FILE or total >= answer_tokens:
                work.add_conversations(unsaved)
                unsaved = []
            if total >= answer_tokens:
                return
    if unsaved:
        work.add_conversations(unsaved)


class _Queue:
    """Prompts still to be answered; those made out of answers come before the others."""

    def __init__(self, model: TargetModel, prompts: list[Prompt], seed: int) -> None:
        self._model, self._seed = model, seed
        self._by_key = {prompt.key: prompt for prompt in prompts}
        self._made: dict[str, Prompt] = {}
        self._begun: set[str] = set()

    def finished(self, conversation: Conversation) -> None:
        """Record an answer, and the prompt that may be made from it."""
        self._begun.add(conversation.key)
        prompt = self._by_key.get(conversation.key)
        if prompt is None:
            return
        answer = self._model.text.decode(conversation.token_ids[conversation.prompt_len :].tolist())
        following = follow_up(prompt, answer, self._seed)
        if following is not None:
            self._made[following.key] = following

    def pending(self) -> Iterator[Sequence]:
        """Yield the next prompts; looked up again each time, since answers add prompts."""
        while (prompt := self._next()) is not None:
            self._begun.add(prompt.key)
            tokens = _prompt_tokens(self._model, prompt.messages)
            if tokens is not None:
                yield Sequence(prompt.key, tokens, len(tokens), len(tokens) + MAX_ANSWER)

    def _next(self) -> Prompt | None:
        for prompts in (self._made, self._by_key):
            for key, prompt in prompts.items():
                if key not in self._begun:
                    return prompt
        return None


def _prompt_tokens(model: TargetModel, messages: tuple[Message, ...]) -> list[int] | None:
    """Return the prompt as a request would have it, None when it is too long."""
    tokens = _encode(model, model.text.render_chat(messages))
    return tokens if len(tokens) <= _MAX_PROMPT else None


def _encode(model: TargetModel, text: str) -> list[int]:
    return list(model.text.encode(text, add_special_tokens=False, param="messages"))
