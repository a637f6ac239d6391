"""The chat side of a model: from messages and tools to a prompt, and how it is answered."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ConfigError, InvalidRequest
from router.text.chat_template import ChatOptions, ChatTemplate
from router.text.model_files import read_chat_template, special_token_texts
from router.tools.call_format import CallFormat
from router.tools.fenced import FENCED
from router.tools.formats import FORMATS, format_of
from router.tools.grammars import GrammarWriter
from router.tools.plain_messages import plain_messages
from router.tools.thinking import BEGIN, END

BUILTIN = "builtin"
"""The tool template that is no file: any chat template, with tools as plain messages."""

MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """What an operator says about a model's chats; see the settings of the same names."""

    tool_template: str = ""
    tool_format: str = "auto"
    reasoning_format: str = "auto"


class Conversation:
    """Renders the chats of one model."""

    def __init__(
        self,
        template: ChatTemplate | None,
        tool_template: ChatTemplate | None,
        settings: ChatSettings,
        added_tokens: Collection[str],
    ) -> None:
        """Chat with `template`, and with `tool_template` where tools take part.

        `added_tokens` are the texts of the tokens that the tokenizer declares apart from others.
        """
        self._template = template
        self._is_builtin = settings.tool_template == BUILTIN
        self._tool_template = template if self._is_builtin else tool_template
        self._settings = settings
        sources = [one.source for one in (template, tool_template) if one]
        self.can_think = settings.reasoning_format == "think" or (
            settings.reasoning_format == "auto" and any(END in source for source in sources)
        )
        tags = [BEGIN, END]
        for form in FORMATS.values():
            tags += [form.trigger, form.end.strip()]
        self.tag_tokens = frozenset(tag for tag in tags if tag in added_tokens and tag[:1] == "<")
        self.grammars = GrammarWriter(self.tag_tokens)

    @classmethod
    def load(
        cls,
        folder: Path,
        tokenizer_config: dict[str, Any],
        settings: ChatSettings,
        added_tokens: Collection[str],
    ) -> Conversation:
        """Read the templates of a checkpoint and of `settings`.

        Raises `CheckpointError` for the checkpoint's and `ConfigError` for the other.
        """
        texts = special_token_texts(tokenizer_config)
        source = read_chat_template(folder, tokenizer_config)
        template = None if source is None else ChatTemplate(source, texts)
        if settings.tool_template == BUILTIN:
            return cls(template, None, settings, added_tokens)
        if not settings.tool_template:
            tool_template = template if template and template.knows_tools else None
            return cls(template, tool_template, settings, added_tokens)
        try:
            own = ChatTemplate(_read(Path(settings.tool_template)), texts)
        except CheckpointError as error:
            raise ConfigError(f"tool_template is {settings.tool_template!r}: {error}") from error
        return cls(template, own, settings, added_tokens)

    @property
    def has_template(self) -> bool:
        """Whether the model can chat."""
        return self._template is not None

    def knows_tools(self) -> bool:
        """Return whether chats may have tools."""
        if self._tool_template is None:
            return False
        try:
            self.call_format()
        except InvalidRequest:
            return False
        return True

    def call_format(self) -> CallFormat:
        """Return how calls are written. Raises `InvalidRequest` where nobody says so."""
        name = self._settings.tool_format
        if name != "auto":
            return FORMATS[name]
        if self._is_builtin:
            return FENCED
        form = format_of(self._template_for_tools().source)
        if form is None:
            raise InvalidRequest(
                "tools are not supported by this server: the model's chat template writes calls in "
                "a format that the server does not know (--tool-format names one)",
                param="tools",
            )
        return form

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """Return the prompt of a conversation.

        Raises `InvalidRequest` when the template refuses it or there is none.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions")
        if options.tools or any(one["role"] == "tool" or "tool_calls" in one for one in messages):
            template = self._template_for_tools()
            if self._is_builtin:
                messages = plain_messages(messages, options.tools)
            return template.render(messages, options)
        return self._template.render(messages, options)

    def _template_for_tools(self) -> ChatTemplate:
        if self._tool_template is None:
            raise InvalidRequest(
                "tools are not supported by this model's chat template: the server can be started "
                "with --tool-template builtin, or with a file",
                param="tools",
            )
        return self._tool_template


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            found = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(found) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"it has more than {MAX_TEMPLATE_BYTES} bytes")
        return found.decode()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"it cannot be read: {error}") from error
