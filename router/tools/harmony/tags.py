"""The tags of harmony, and the marks that stand for them in an answer's text.

A mark is half of a surrogate pair, which no text has. So a tag that a model spells, as in code
about this format, is told from the token.
"""

from __future__ import annotations

from collections.abc import Container

from router.tools.call_format import CallFormat

START_TAG, END_TAG, MESSAGE_TAG = "<|start|>", "<|end|>", "<|message|>"
CHANNEL_TAG, CONSTRAIN_TAG = "<|channel|>", "<|constrain|>"
RETURN_TAG, CALL_TAG = "<|return|>", "<|call|>"

START, END, MESSAGE, CHANNEL = "\udff0", "\udff1", "\udff2", "\udff3"
CONSTRAIN, RETURN, CALL = "\udff4", "\udff5", "\udff6"
MARKS = {
    START_TAG: START,
    END_TAG: END,
    MESSAGE_TAG: MESSAGE,
    CHANNEL_TAG: CHANNEL,
    CONSTRAIN_TAG: CONSTRAIN,
    RETURN_TAG: RETURN,
    CALL_TAG: CALL,
}
"""The mark of each tag."""
_NEEDED = (START_TAG, END_TAG, MESSAGE_TAG, CHANNEL_TAG)
_WRITTEN = (START_TAG, MESSAGE_TAG, CHANNEL_TAG)

ROLE = "assistant"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
NAMESPACE = "functions."
"""The beginning of a recipient that is a function of the request."""

HARMONY = CallFormat(
    name="harmony",
    trigger=f"{CHANNEL_TAG}{COMMENTARY} to={NAMESPACE}",
    opening="",
    after_name=f" {CONSTRAIN_TAG}json{MESSAGE_TAG}",
    end=CALL_TAG,
    separator=f"{END_TAG}{START_TAG}{ROLE}",
)
"""A call as these models write it most often. No other model has it, so no setting names it."""


def writes_harmony(template: str) -> bool:
    """Return whether a chat template writes messages to channels."""
    return all(tag in template for tag in _WRITTEN)


def has_tags(added_tokens: Container[str]) -> bool:
    """Return whether the tags of messages are tokens of a tokenizer."""
    return all(tag in added_tokens for tag in _NEEDED)


def marked(text: str) -> str:
    """Return `text` with marks in place of tags."""
    for tag, mark in MARKS.items():
        text = text.replace(tag, mark)
    return text
