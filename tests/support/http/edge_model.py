"""A small tokenizer with a chat template, as a model of which no node has the weights."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from grammars.compiler import GrammarCompiler
from router.text.text_model import TextModel

MODEL_NAME = "tiny"
CONTEXT = 256
BOS, EOS = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ bos_token + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)
CORPUS = ["Hello world, the quick brown fox jumps over the lazy dog.", "user assistant system"] * 4


def write_model_folder(folder: Path, **generation: Any) -> Path:
    """A byte-level BPE tokenizer with chat template; `generation` is its generation_config."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(BOS, special=True), AddedToken(EOS, special=True)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def grammars_of(model: TextModel) -> GrammarCompiler:
    """What compiles grammars for a model."""
    text, ends = model.tokenizer.to_str(), sorted(model.eos_token_ids)
    return GrammarCompiler(LLTokenizer(text, n_vocab=model.vocab_size, eos_token=ends))


@cache
def tiny_model() -> TextModel:
    """The model that the edge's tests share."""
    with tempfile.TemporaryDirectory() as folder:
        return TextModel.load(write_model_folder(Path(folder)), MODEL_NAME, 0)
