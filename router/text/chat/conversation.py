"""The chat side of a model: from messages and tools to a prompt, and how it is answered."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ConfigError, InvalidRequest
from common.files.kept_files import KeptFiles
from common.files.tokenizer_files import special_tokens
from router.text.chat.chat_template import ChatOptions, ChatTemplate
from router.text.model_files import (
    DEFAULT,
    TOOL_USE,
    read_chat_templates,
)
from router.tools.call_format import CallFormat
from router.tools.fenced import FENCED
from router.tools.formats import FORMATS, format_of
from router.tools.grammars import GrammarWriter
from router.tools.harmony.tags import HARMONY, MARKS, has_tags, writes_harmony
from router.tools.plain_messages import plain_messages
from router.tools.thinking import THINK, ThinkingTags, tags_in

AUTO = "auto"
"""The tool template that is one of the model's own, where that writes calls in a known format, and
else `BUILTIN`."""
_AUTO = (AUTO, "")
"""`AUTO`, and what configurations of earlier releases say."""
BUILTIN = "builtin"
"""The tool template that is no file: any chat template, with tools as plain messages."""

MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """What an operator says about a model's chats; see the settings of the same names."""

    tool_template: str = AUTO
    tool_format: str = "auto"
    reasoning_format: str = "auto"


class Conversation:
    """Renders the chats of one model."""

    def __init__(
        self,
        template: ChatTemplate | None,
        tool_template: ChatTemplate | None,
        settings: ChatSettings,
        added_tokens: Mapping[str, int],
    ) -> None:
        """Chat with `template`, and with `tool_template` where tools take part.

        Without one, tools are plain messages. `added_tokens` are the ids of the tokens that the
        tokenizer declares apart from others, by their texts.
        """
        self._template = template
        self._tool_template = tool_template
        self._settings = settings
        sources = [one.source for one in (template, tool_template) if one]
        self.thinking_tags: ThinkingTags | None = None
        """The tags of what the model thinks; None: it is not told apart."""
        if settings.reasoning_format != "none":
            self.thinking_tags = tags_in(sources)
        if settings.reasoning_format == "think":
            self.thinking_tags = self.thinking_tags or THINK
        self.is_harmony = has_tags(added_tokens) and any(map(writes_harmony, sources))
        """Whether answers are messages to channels."""
        self.tells_thinking = settings.reasoning_format != "none"
        """Whether what is thought is told apart, where answers are messages."""
        tags = {*MARKS} if self.is_harmony else {*(self.thinking_tags or THINK)}
        if self.knows_tools():
            tags |= self.call_format().tags
        self.tag_tokens = {tag: added_tokens[tag] for tag in tags if tag in added_tokens}
        self.marks = {
            token_id: MARKS[tag] for tag, token_id in self.tag_tokens.items() if self.is_harmony
        }
        """What stands in an answer for tokens that are tags of harmony, by token id."""
        self.grammars = GrammarWriter(self.tag_tokens, self.thinking_tags or THINK)

    @classmethod
    def load(
        cls,
        folder: Path,
        tokenizer_config: dict[str, Any],
        settings: ChatSettings,
        added_tokens: Mapping[str, int],
        files: KeptFiles,
    ) -> Conversation:
        """Read the templates of a checkpoint and of `settings`.

        Raises `CheckpointError` for the checkpoint's and `ConfigError` for the other.
        """
        texts = special_tokens(folder, files)
        sources = read_chat_templates(folder, tokenizer_config, files)
        own = {name: ChatTemplate(source, texts) for name, source in sources.items()}
        template, wanted = own.get(DEFAULT), settings.tool_template
        if wanted == BUILTIN:
            return cls(template, None, settings, added_tokens)
        if wanted in _AUTO:
            known = [
                one for one in (template, own.get(TOOL_USE)) if one and _can_call(one, settings)
            ]
            return cls(template, known[0] if known else None, settings, added_tokens)
        try:
            tool_template = ChatTemplate(_read(Path(wanted), files), texts)
        except CheckpointError as error:
            raise ConfigError(f"tool_template is {wanted!r}: {error}") from error
        return cls(template, tool_template, settings, added_tokens)

    @property
    def has_template(self) -> bool:
        """Whether the model can chat."""
        return self._template is not None

    def knows_tools(self) -> bool:
        """Return whether chats may have tools."""
        try:
            self.call_format()
        except InvalidRequest:
            return False
        return self.has_template

    def call_format(self) -> CallFormat:
        """Return how calls are written. Raises `InvalidRequest` where nobody says so."""
        name = self._settings.tool_format
        if self.is_harmony:
            is_own = self._tool_template is not None and writes_harmony(self._tool_template.source)
            if name == AUTO and is_own:
                return HARMONY
            raise InvalidRequest(
                "tools are not supported by this server: the model answers in messages to channels "
                "(harmony), and --tool-template or --tool-format asks for other calls, or its "
                "template knows none",
                param="tools",
            )
        if name != "auto":
            return FORMATS[name]
        if self._tool_template is None:
            return FENCED
        form = format_of(self._tool_template.source)
        if form is None:
            raise InvalidRequest(
                "tools are not supported by this server: the template of --tool-template writes "
                "calls in a format that the server does not know (--tool-format names one)",
                param="tools",
            )
        return form

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """Return the prompt of a conversation.

        Raises `InvalidRequest` when the template refuses it or there is none.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions")
        has_calls = any(one["role"] == "tool" or "tool_calls" in one for one in messages)
        # Earlier calls alone are not parsed, so the model's own template may write them as it does.
        can_show = self._template.knows_tools and self._template.knows_calls
        is_own = not has_calls or (self._is_auto and can_show)
        if is_own and not options.tools:
            return self._template.render(messages, options)
        if self._tool_template is not None:
            return self._tool_template.render(messages, options)
        return self._template.render(plain_messages(messages, options.tools), options)

    @property
    def _is_auto(self) -> bool:
        return self._settings.tool_template in _AUTO


def _can_call(template: ChatTemplate, settings: ChatSettings) -> bool:
    """Return whether a template tells a model how to call tools, in a format that is known, and
    what it has called."""
    source = template.source
    is_known = settings.tool_format != AUTO or writes_harmony(source) or bool(format_of(source))
    return template.knows_tools and template.knows_calls and is_known


def _read(path: Path, files: KeptFiles) -> str:
    try:
        found = files.read(path, MAX_TEMPLATE_BYTES + 1)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if len(found) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"it has more than {MAX_TEMPLATE_BYTES} bytes")
        return found.decode()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"it cannot be read: {error}") from error
