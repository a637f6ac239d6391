"""Render a model's chat template like `transformers`.

Templates come with checkpoints, so they are untrusted code: they run in jinja2's immutable sandbox
and can read nothing but the messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import CheckpointError, InvalidRequest
from router.text.chat.efforts import Efforts, efforts_by
from router.text.chat.system_messages import treatment_by
from router.text.chat.turn_taking import turns_by
from router.tools.earlier_calls import CallsForm, form_by, in_form
from router.tools.harmony.history import EFFORTS, NO_THINKING, described, history
from router.tools.harmony.tags import writes_harmony
from router.tools.thinking import THINK, tags_in


class _GenerationBlocks(Extension):
    """Render `{% generation %}…{% endgeneration %}`, which marks training text, as its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON. jinja2's own filter escapes HTML, which would change the prompt."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


_ASKED = {"role": "user", "content": "Hi"}
_END_OF_FINAL_MESSAGE = "\ue000end of the final message\ue000"
_END_OF_THOUGHT = "\ue000end of its thought\ue000"
"""Characters for private use, which no template treats in a special way."""


class TemplateRefused(InvalidRequest):
    """The model's chat template cannot render the messages. The text may quote them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a template is told besides the messages.

    `variables` may not replace those that this module sets. With `continues_final_message` the
    prompt ends with the text of the last message, which is left open, without any generation
    prompt. `tools` are the functions that the model may call, as OpenAI has them. With
    `keeps_system` no message of the system is lost where the template leaves out all but the first.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    has_generation_prompt: bool = True
    continues_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    keeps_system: bool = False


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template.

        `special_tokens` are the variables a template may use, such as `bos_token`. Raises
        `CheckpointError` when the source is not a valid template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
            # Every rendering copies them; a chain of mappings is copied key by key.
            self._template.globals = dict(self._template.globals)
            variables = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from error
        self.source = source
        self.knows_tools = "tools" in variables
        self._tags = tags_in([source]) or THINK

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            return self._rendered(messages, ChatOptions(), True)

        def told(variables: Mapping[str, Any]) -> str:
            return self._rendered([_ASKED], ChatOptions(variables=variables), True)

        self._is_harmony = writes_harmony(source)
        self._efforts = Efforts(EFFORTS, NO_THINKING) if self._is_harmony else efforts_by(told)
        self._system = treatment_by(render)
        self._turns = turns_by(render)
        self._calls_form = form_by(render)

    @property
    def knows_calls(self) -> bool:
        """Whether earlier calls and their results are in the prompt, whatever their ids are."""
        return self._calls_form is not None

    def render(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> str:
        """Return the prompt, up to where the assistant's answer begins.

        Raises `TemplateRefused` when the template refuses the messages.
        """
        options = options or ChatOptions()
        options = replace(options, variables=self._efforts.fitted(options.variables))
        keeps_all = options.keeps_system or self._is_harmony
        messages = self._system.fitted(messages, keeps_all=keeps_all)
        messages = self._turns.fitted(messages)
        if self._is_harmony:
            messages = history(messages, is_continued=options.continues_final_message)
            options = replace(options, tools=described(options.tools))
        messages = in_form(messages, self._calls_form or CallsForm())
        if not options.continues_final_message:
            return self._rendered(messages, options, options.has_generation_prompt)
        content: str = messages[-1]["content"]
        if self._loses_thought(messages, options):
            return self._up_to_end(messages, "", options) + content
        return self._up_to_end(messages, content, options)

    def _loses_thought(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> bool:
        """Return whether the thinking in the last message's text is not in the prompt.

        Templates leave it out of answers that are whole, and do not know that this one goes on.
        """
        thought, end, answer = messages[-1]["content"].partition(self._tags.end)
        if not end:
            return False
        marked = f"{thought.rstrip()}{_END_OF_THOUGHT}{end}{answer}"
        return _END_OF_THOUGHT not in self._up_to_end(messages, marked, options)

    def _up_to_end(
        self, messages: Sequence[Mapping[str, Any]], content: str, options: ChatOptions
    ) -> str:
        """Return the prompt up to the end of the last message, whose text is `content`."""
        *earlier, final = messages
        marked = dict(final) | {"content": content + _END_OF_FINAL_MESSAGE}
        text, end, _ = self._rendered([*earlier, marked], options, False).rpartition(
            _END_OF_FINAL_MESSAGE
        )
        if not end:
            raise TemplateRefused(
                "the model's chat template leaves out the last message, which was to be continued",
                param="continue_final_message",
            )
        # A template may write the last message more than once.
        return text.replace(_END_OF_FINAL_MESSAGE, "")

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions,
        has_generation_prompt: bool,
    ) -> str:
        fixed = {
            **self._special_tokens,
            "messages": messages,
            "tools": options.tools or None,
            "documents": None,
            "add_generation_prompt": has_generation_prompt,
        }
        try:
            return self._template.render({**options.variables, **fixed})
        except jinja2.TemplateError as error:
            raise TemplateRefused(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except Exception as error:  # the template's own, of any kind, for these messages
            raise TemplateRefused(
                f"the model's chat template cannot render these messages: {error!r}",
                param="messages",
            ) from error
