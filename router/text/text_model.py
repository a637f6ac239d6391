"""The text side of a model: tokenizer, chat template and limits. No weights, no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.errors import CheckpointError, ConfigError, InvalidRequest
from common.files.kept_files import KeptFiles
from common.files.model_config import longest_context, text_config
from common.files.tokenizer_files import known_ids, tokenizer_end_ids
from common.model_names import model_names
from common.request import SamplingParams
from router.text.chat.chat_template import ChatOptions
from router.text.chat.conversation import ChatSettings, Conversation
from router.text.context_limits import ContextExceeded, context_length
from router.text.model_files import (
    read_json,
    read_json_if_there,
    read_tokenizer,
)
from router.text.output.detokenizer import NO_MARKS, Detokenizer
from router.text.output.logprobs_json import DescribeToken, TokenText, token_text
from router.text.special_text import SpecialText
from router.text.token_lookup import TokenBytes, TokenTextCache

DEFAULT_CHAT = ChatSettings()

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MOST_DESCRIBED = 16_384
"""Tokens whose looks are remembered, in 3 MB: a model has ten times as many, and shows few."""
_PROBE_CHARS_PER_TOKEN = 32
"""Text longer than this times the context is probed before all of it is tokenised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """The text side of the model that the cluster serves.

    Requests may name it by one of `other_names` too. `eos_token_ids` are those of config.json, of
    generation_config.json and of the tokenizer, as far as the model has them: nodes stop at all.
    `default_sampling` are `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` of
    generation_config.json: the model's defaults for parameters that a request does not set.
    `tokenizer` is that of its folder.
    """

    name: str
    other_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    default_sampling: Mapping[str, float]
    tokenizer: Tokenizer
    _special_token_ids: frozenset[int]
    _special_tag_ids: frozenset[int]
    _special_text: SpecialText
    _describe: DescribeToken
    _whole_texts: TokenTextCache
    _bytes_of: Mapping[int, int]
    _plain_token: tuple[int, ...]
    chat: Conversation

    @classmethod
    def load(
        cls,
        folder: Path,
        served_model_name: str,
        max_model_len: int,
        chat: ChatSettings = DEFAULT_CHAT,
        files: KeptFiles | None = None,
    ) -> TextModel:
        """Read a Hugging Face folder, and what `chat` names; `files` keep what was read.

        `served_model_name` '' means the folder's name, and names after commas are other ones;
        `max_model_len` 0 means the model's length.
        Raises `CheckpointError`, naming the file at fault, and `ConfigError` when `max_model_len`
        is more than the model's positions, or the tool template of `chat` is not one.
        """
        files = KeptFiles() if files is None else files
        if not files.kept and not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder: wanted a Hugging Face checkpoint")
        config = text_config(read_json(folder / "config.json", files))
        vocab_size = _positive_int(config, "vocab_size", folder)
        tokenizer = read_tokenizer(folder, vocab_size, files)
        tokenizer_config = read_json_if_there(folder / "tokenizer_config.json", files)
        generation = read_json_if_there(folder / "generation_config.json", files)
        ends = (
            _eos_token_ids(generation, folder / "generation_config.json")
            | _eos_token_ids(config, folder / "config.json")
            | tokenizer_end_ids(folder, files)
        )
        added = tokenizer.get_added_tokens_decoder()
        added_ids = {token.content: i for i, token in added.items()}
        name, *other_names = (
            model_names(served_model_name) if served_model_name else (folder.resolve().name,)
        )
        token_bytes = TokenBytes(tokenizer)
        talk = Conversation.load(folder, tokenizer_config, chat, added_ids, files)
        return cls(
            name=name,
            other_names=tuple(other_names),
            max_model_len=_context_length(config, max_model_len, folder),
            vocab_size=vocab_size,
            eos_token_ids=known_ids(ends, vocab_size),
            default_sampling=_default_sampling(generation, folder),
            tokenizer=tokenizer,
            _special_token_ids=frozenset(i for i, token in added.items() if token.special),
            _special_tag_ids=frozenset(
                i
                for i, token in added.items()
                if token.special and token.content in talk.tag_tokens
            ),
            _special_text=SpecialText([one.content for one in added.values() if one.special]),
            _describe=_described_tokens(token_bytes),
            _whole_texts=TokenTextCache(tokenizer),
            _bytes_of=token_bytes.single_bytes(),
            _plain_token=_plain_token(tokenizer),
            chat=talk,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a request may call the model; answers have the first one."""
        return (self.name, *self.other_names)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> str:
        """Return the prompt text of a conversation, with marks (`router.text.special_text`).

        Raises `InvalidRequest` when the template refuses it or there is no template.
        """
        options = options or ChatOptions()
        if options.variables or options.tools:
            variables, tools = self._marked(dict(options.variables)), self._marked(options.tools)
            options = replace(options, variables=variables, tools=tools)
        return self.chat.render(self._marked(messages), options)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        is_plain: bool = False,
        param: str,
        max_model_len: int | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of `text`. Without `add_special_tokens` it is one of `render_chat`,
        with marks, unless it `is_plain`.

        Raises `ContextExceeded` for text that cannot fit into `max_model_len` (None: the model's),
        without tokenising all of it when its beginning alone is too long.
        """
        max_model_len = max_model_len or self.max_model_len
        has_marks = not (add_special_tokens or is_plain)
        probe = max_model_len * _PROBE_CHARS_PER_TOKEN
        if len(text) > probe:
            num_tokens = len(self._ids(text[:probe], add_special_tokens, has_marks))
            if num_tokens > max_model_len:
                raise ContextExceeded(
                    f"prompt is too long: {num_tokens} tokens > {max_model_len - 1} maximum in the "
                    f"first {probe} of its {len(text)} characters: {context_length(max_model_len)}",
                    param=param,
                )
        return tuple(self._ids(text, add_special_tokens, has_marks))

    def spelt(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a short text, in which no character is a mark.

        The text of a special token is that token.
        """
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def check_ids(self, ids: Sequence[Any], param: str) -> None:
        """Raise `InvalidRequest` for what is no token id of the vocabulary."""
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise InvalidRequest(
                    f"{param} holds a {type(token_id).__name__} among token ids: wanted text, "
                    "texts, token ids or lists of token ids",
                    param=param,
                )
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"{param} holds token id {token_id}: this model has ids 0 to "
                    f"{self.vocab_size - 1}",
                    param=param,
                )

    def _ids(self, text: str, add_special_tokens: bool, has_marks: bool) -> list[int]:
        pieces = self._special_text.pieces(text) if has_marks else [text]
        # The fast variant leaves out the position of each token in the text.
        # A text full of special tokens has few different pieces.
        different = list(dict.fromkeys(pieces))
        encodings = self.tokenizer.encode_batch_fast(
            different, add_special_tokens=add_special_tokens
        )
        if len(pieces) == 1:
            return encodings[0].ids
        ids = {piece: one.ids for piece, one in zip(different, encodings, strict=True)}
        return list(chain.from_iterable(ids[piece] for piece in pieces))

    def _marked(self, value: Any) -> Any:
        """Return JSON with marks in all of its texts."""
        if isinstance(value, str):
            return self._special_text.marked(value)
        if isinstance(value, Mapping):
            return {self._special_text.marked(key): self._marked(one) for key, one in value.items()}
        return [self._marked(one) for one in value] if isinstance(value, Sequence) else value

    def decode(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`, as a rule without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=not with_special_tokens)

    def new_detokenizer(
        self,
        continues: Sequence[int] = (),
        *,
        with_special_tokens: bool = False,
        with_special_tags: bool = False,
        keeps_first_space: bool = False,
    ) -> Detokenizer:
        """Return a detokenizer for one answer; `continues` are the prompt's tokens it continues.

        `with_special_tags`: of the special tokens, the tags of calls and of thinking have a text;
        those of harmony have marks.
        With `keeps_first_space` the first token has the space that it has after other ones.
        """
        shown = self._special_tag_ids if with_special_tags else frozenset[int]()
        hidden = frozenset[int]() if with_special_tokens else self._special_token_ids - shown
        return Detokenizer(
            partial(self.decode, with_special_tokens=with_special_tokens or bool(shown)),
            hidden,
            continues,
            behind=self._plain_token if keeps_first_space else (),
            whole_text=self._whole_texts.__getitem__,
            bytes_of=self._bytes_of,
            marks=self.chat.marks if with_special_tags else NO_MARKS,
        )

    def special_tokens_in(
        self, texts: Sequence[str], *, with_special_tags: bool = False
    ) -> dict[str, int]:
        """Return the ids of special tokens that `texts` name, by the name.

        `with_special_tags`: without those that have a text in `new_detokenizer`.
        """
        shown = self._special_tag_ids if with_special_tags else frozenset[int]()
        names = dict.fromkeys(chain.from_iterable(map(self._special_text.named_in, texts)))
        ids = ((name, self.tokenizer.token_to_id(name)) for name in names)
        return {name: one for name, one in ids if one is not None and one not in shown}

    def describe_token(self, token_id: int) -> TokenText:
        """Return how logprobs show a token."""
        return self._describe(token_id)


def _plain_token(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return a token of letters alone, if there is one."""
    ids = range(tokenizer.get_vocab_size())
    found = (i for i in ids if (text := tokenizer.decode([i])).isascii() and text.isalpha())
    return tuple(islice(found, 1))


def _described_tokens(token_bytes: TokenBytes) -> DescribeToken:
    """Return what describes tokens, and remembers those that came last: many come again."""

    @lru_cache(maxsize=MOST_DESCRIBED)
    def describe(token_id: int) -> TokenText:
        return token_text(token_bytes[token_id])

    return describe


def _positive_int(config: Mapping[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = "missing" if value is None else repr(value)
        raise CheckpointError(
            f"{key} in {folder / 'config.json'} is {found}: wanted a positive integer"
        )
    return value


def _context_length(config: Mapping[str, Any], max_model_len: int, folder: Path) -> int:
    _positive_int(config, "max_position_embeddings", folder)
    longest = longest_context(config)
    if max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {max_model_len}: wanted at most {longest}, the model's longest "
            "context"
        )
    return max_model_len or longest


def _eos_token_ids(config: Mapping[str, Any], path: Path) -> frozenset[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}: wanted a token id or a list")
    return frozenset(ids)


def filters_of_nodes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling fields as nodes have them.

    `top_p` 0 keeps the likeliest token alone, which is their `top_k` 1, and `top_k` -1 is another
    word for all.
    """
    made = dict(fields)
    if made.get("top_k") == -1:
        made["top_k"] = 0
    if made.get("top_p") == 0:
        made |= {"top_k": 1, "top_p": 1.0}
    return made


def _default_sampling(generation: Mapping[str, Any], folder: Path) -> dict[str, float]:
    path = folder / "generation_config.json"
    chosen = {
        key: _sampling_number(key, generation[key], path)
        for key in _SAMPLING_KEYS
        if generation.get(key) is not None
    }
    try:
        SamplingParams(max_tokens=1, **filters_of_nodes(chosen))
    except InvalidRequest as error:
        raise CheckpointError(f"{path}: {error}") from error
    return chosen


def _sampling_number(key: str, value: object, path: Path) -> int | float:
    """Return a number that fits the wire. JSON does not tell 50.0 from 50: `top_k` may be either.

    Raises `CheckpointError` for anything else than a number, and a `top_k` with a fraction.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key != "top_k":
            return value
        if value == value // 1:
            return int(value)
    wanted = "a whole number" if key == "top_k" else "a number"
    raise CheckpointError(f"{path}: {key} is {value!r}: wanted {wanted}")
