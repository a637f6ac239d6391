"""Whether a grammar takes a text, judged by llguidance itself."""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer, grammar_from
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.tools.grammars import GrammarWriter
from router.tools.thinking import THINK, ThinkingTags


@dataclass
class Judge:
    """A tokenizer, with tags as tokens of their own or without."""

    tags: tuple[str, ...]
    thinking: ThinkingTags = THINK
    ends: str = "<|end|>"
    """The token that ends an answer."""

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer(
            models.BPE(
                vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
                merges=[],
            )
        )
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
        self.tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in self.tags])
        self.matching = LLTokenizer(
            self.tokenizer.to_str(), eos_token=self.tokenizer.token_to_id(self.ends)
        )
        ids = {tag: self.tokenizer.token_to_id(tag) or 0 for tag in self.tags}
        self.writer = GrammarWriter(ids, self.thinking)

    def accepts(self, grammar: str, *texts: str) -> bool:
        """Whether the grammar takes the texts, each tokenised alone, as a whole answer."""
        matcher = LLMatcher(self.matching, grammar_from("lark", grammar))
        assert not matcher.is_error(), matcher.get_error()
        ids = [i for text in texts for i in self.tokenizer.encode(text).ids]
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
