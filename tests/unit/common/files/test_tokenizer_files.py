"""What of a tokenizer's files routers and nodes read alike: its end, and the tokens of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from common.errors import CheckpointError
from common.files.kept_files import KeptFiles
from common.files.tokenizer_files import (
    known_ids,
    model_tokenizer,
    plain_tokens_digest,
    special_tokens,
    tokenizer_end_ids,
)
from common.grammar import Grammar, GrammarKind
from engine.runner.weights.spec.model_spec import read_eos_token_ids
from grammars.compiler import GrammarCompiler
from pdserve.checkpoints.gguf_folder import make_gguf_folder
from router.text.text_model import TextModel
from tests.support.http.edge_model import BOS, EOS, write_model_folder
from tests.support.models.tokenizer_gguf import TOKENS, write_tiny_gguf

END = 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path)


def rewrite(path: Path, **fields: Any) -> None:
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**old, **fields}))


@pytest.mark.covers("K08")
@pytest.mark.parametrize("token", [EOS, {"content": EOS, "special": True}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_end_of_the_tokenizer_is_an_end(folder: Path, name: str, token: Any) -> None:
    rewrite(folder / "config.json", eos_token_id=7)
    rewrite(folder / "tokenizer_config.json", eos_token=None)
    assert tokenizer_end_ids(folder) == frozenset()
    rewrite(folder / name, eos_token=token)
    assert tokenizer_end_ids(folder) == {END}
    assert read_eos_token_ids(folder) == {END, 7}
    assert TextModel.load(folder, "", 0).eos_token_ids == {END, 7}


def test_the_end_may_be_no_added_token(folder: Path) -> None:
    rewrite(folder / "tokenizer_config.json", eos_token="z")
    (token,) = tokenizer_end_ids(folder)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token(token) == "z"
    rewrite(folder / "tokenizer_config.json", eos_token="<unheard of>")
    assert tokenizer_end_ids(folder) == frozenset()
    layout = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["</s>", -1.0]]}}
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    rewrite(folder / "tokenizer_config.json", eos_token="</s>")
    assert tokenizer_end_ids(folder) == {1}


IN_TEMPLATES = "{% for m in messages %}{{ m['content'] + '<|eot_id|>' }}{% endfor %}"
TEMPLATES: list[tuple[str, Any]] = [
    ("tokenizer_config.json", IN_TEMPLATES),
    ("tokenizer_config.json", [{"name": "default", "template": IN_TEMPLATES}]),
    ("chat_template.jinja", IN_TEMPLATES),
    ("additional_chat_templates/tool_use.jinja", IN_TEMPLATES),
]


@pytest.mark.covers("K18")
@pytest.mark.parametrize(("name", "template"), TEMPLATES)
@pytest.mark.parametrize("is_special", [True, False])
def test_the_end_of_a_turn_in_the_template_is_an_end(
    folder: Path, name: str, template: Any, is_special: bool
) -> None:
    size = larger(folder, special=is_special, text="<|eot_id|>")
    rewrite(folder / "config.json", vocab_size=size + 1)
    assert read_eos_token_ids(folder) == {END}, "no template has it"
    if name.endswith(".jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(template)
    else:
        rewrite(folder / name, chat_template=template)
    ends = {END, size} if is_special else {END}
    assert read_eos_token_ids(folder) == ends
    assert TextModel.load(folder, "", 0).eos_token_ids == ends


@pytest.mark.covers("K18")
@pytest.mark.parametrize("behind", [None, "<|return|>", "<|flush|>"])
def test_what_ends_a_part_of_an_answer_is_no_end(folder: Path, behind: str | None) -> None:
    """Some have `<|end|>` between the reasoning and the answer; others end a turn with it."""
    template = "{{ '<|end|>' }}{{ '<|start|>assistant<|message|>' }}"
    rewrite(folder / "tokenizer_config.json", chat_template=template)
    end = larger(folder, special=True, text="<|end|>")
    rewrite(folder / "config.json", vocab_size=end + 1)
    if behind is not None:
        size = larger(folder, special=True, text=behind)
        rewrite(folder / "config.json", vocab_size=size + 1)
    ends = {END, end} if behind is None else {END}
    assert read_eos_token_ids(folder) == ends
    assert TextModel.load(folder, "", 0).eos_token_ids == ends


@pytest.mark.covers("K18")
@pytest.mark.parametrize("is_harmony", [True, False])
def test_harmony_ends_an_answer_behind_a_text_and_behind_a_call(
    folder: Path, is_harmony: bool
) -> None:
    """Files in GGUF name one end; templates of these models need not write the other one."""
    names = ("<|return|>", "<|call|>", "<|end|>")
    ids = {name: larger(folder, special=True, text=name) for name in names}
    channel = "<|channel|>final" if is_harmony else ""
    template = f"{{{{ '<|end|><|start|>assistant{channel}<|message|>' }}}}"
    rewrite(folder / "tokenizer_config.json", chat_template=template)
    rewrite(folder / "config.json", vocab_size=max(ids.values()) + 1)
    ends = {END, ids["<|return|>"], ids["<|call|>"]} if is_harmony else {END}
    assert read_eos_token_ids(folder) == ends
    assert TextModel.load(folder, "", 0).eos_token_ids == ends


@pytest.mark.covers("K18")
def test_a_gguf_file_of_its_time_ends_turns_as_its_template(tmp_path: Path) -> None:
    """Files made when Llama 3 came out name the end of a text, and no end of a turn."""
    at = TOKENS.index("2")
    changes = {
        "tokenizer.ggml.tokens": [*TOKENS[:at], "<|eot_id|>", *TOKENS[at + 1 :]],
        "tokenizer.ggml.token_type": [3 if one in (0, at) else 1 for one in range(len(TOKENS))],
        "tokenizer.chat_template": IN_TEMPLATES,
    }
    folder = tmp_path / "made"
    folder.mkdir()
    make_gguf_folder(write_tiny_gguf(tmp_path / "model.gguf", changes), folder)
    assert read_eos_token_ids(folder) == {0, at}


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_file_that_is_no_json_is_named(folder: Path, text: str) -> None:
    (folder / "tokenizer_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        tokenizer_end_ids(folder)


def vocabulary_of(folder: Path, vocab: Any) -> str:
    layout = {"model": {"type": "BPE", "vocab": vocab}}
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    return plain_tokens_digest(folder)


@pytest.mark.covers("M08")
def test_a_tokenizer_is_told_apart_by_its_words_alone(folder: Path) -> None:
    known = vocabulary_of(folder, {"a": 5, "of": 9, "2": 3})
    assert known
    assert known == vocabulary_of(folder, {"2": 3, "of": 9, "a": 5})
    assert known == vocabulary_of(
        folder, {"a": 5, "of": 9, "2": 3, "<s>": 1, "\u0120of": 7, "[PAD17]": 17, "\u00e9": 8}
    ), "what forms of one tokenizer write in different ways"
    assert known != vocabulary_of(folder, {"a": 9, "of": 5, "2": 3})
    assert known != vocabulary_of(folder, {"a": 5, "of": 9, "2": 3, "to": 4})
    pieces = [["<unk>", 0.0], ["a", -1.0], ["of", -2.0]]
    assert vocabulary_of(folder, pieces) == vocabulary_of(folder, {"a": 1, "of": 2})


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": 1}'])
def test_of_a_tokenizer_that_cannot_be_read_nothing_is_known(
    folder: Path, text: str | None
) -> None:
    path = folder / "tokenizer.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert plain_tokens_digest(folder) == ""


@pytest.mark.covers("M08")
def test_a_gguf_file_has_the_words_of_the_tokenizer_that_it_was_made_from(tmp_path: Path) -> None:
    words = {token: at for at, token in enumerate(TOKENS) if token[0] not in "<\u0120"}
    folder = tmp_path / "made"
    folder.mkdir()
    make_gguf_folder(write_tiny_gguf(tmp_path / "model.gguf"), folder)
    assert plain_tokens_digest(folder) == vocabulary_of(tmp_path, words)


@pytest.mark.covers("K09")
def test_ends_beyond_the_vocabulary_are_none(folder: Path) -> None:
    rewrite(folder / "generation_config.json", eos_token_id=[1, 99_999, -1])
    assert TextModel.load(folder, "", 0).eos_token_ids == {END}
    assert known_ids(read_eos_token_ids(folder), 320) == {END}


def larger(folder: Path, *, special: bool, text: str = "<extra>") -> int:
    """Add a token that the model does not have; return the model's number of tokens."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    before = tokenizer.get_vocab_size()
    add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
    add([AddedToken(text, special=special)])
    tokenizer.save(str(path))
    return before


@pytest.mark.covers("K09")
@pytest.mark.parametrize("special", [False, True])
def test_constrained_answers_need_no_token_that_the_model_lacks(
    folder: Path, special: bool
) -> None:
    size = larger(folder, special=special)
    compiler = GrammarCompiler.load(folder, size, {END})
    assert compiler is not None
    assert compiler.tokenizer.vocab_size == size
    text = Grammar(GrammarKind.LARK, 'start: "a<extra>b"', "x")
    matcher = compiler.matcher(text)
    tokens = compiler.tokenizer.tokenize_str("a<extra>b")
    assert max(tokens) < size
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    model = TextModel.load(folder, "", 0)
    ids = model.encode("a<extra>b", add_special_tokens=False, param="prompt")
    assert max(ids) < size
    assert model.decode(ids) == "a<extra>b"


def test_merges_of_tokens_that_are_gone_go_too(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    size = Tokenizer.from_str(text).get_vocab_size() - 30
    for merges in ("lists", "texts"):
        layout = json.loads(text)
        if merges == "texts":
            layout["model"]["merges"] = [" ".join(pair) for pair in layout["model"]["merges"]]
        (folder / "tokenizer.json").write_text(json.dumps(layout))
        cut = model_tokenizer(folder, size, KeptFiles())
        tokenizer = Tokenizer.from_str(cut)
        assert max(tokenizer.get_vocab().values()) == size - 1
        assert tokenizer.decode(tokenizer.encode("Hello world, the quick").ids) == (
            "Hello world, the quick"
        )
        LLTokenizer(cut, n_vocab=size, eos_token=[END])


def test_a_tokenizer_that_fits_stays_as_it_is(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    assert model_tokenizer(folder, 320, KeptFiles()) == text
    assert model_tokenizer(folder, 5000, KeptFiles()) == text
    smaller = GrammarCompiler.load(folder, 5000, {END})
    assert smaller is not None
    smaller.matcher(Grammar(GrammarKind.REGEX, "[0-9]{3}", "x"))


def test_pieces_of_a_unigram_model_are_cut(tmp_path: Path) -> None:
    layout = {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", 0.0]]}, "added_tokens": []}
    rewrite(tmp_path / "tokenizer.json", **layout)
    cut = json.loads(model_tokenizer(tmp_path, 1, KeptFiles()))
    assert cut["model"]["vocab"] == [["a", 0.0]]


TURN = "<|turn|>"
DECLARED: dict[str, Callable[[int], dict[str, Any]]] = {
    "tokenizer_config.json": lambda at: {"added_tokens_decoder": {str(at): {"content": TURN}}},
    "added_tokens.json": lambda at: {TURN: at},
}


def encode(folder: Path, text: str) -> list[int]:
    model = TextModel.load(folder, "", 0)
    return list(model.encode(text, add_special_tokens=False, is_plain=True, param="prompt"))


@pytest.mark.covers("K15")
@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize("gap", [0, 3])
def test_a_token_that_another_file_declares_is_one_with_its_id(
    folder: Path, name: str, gap: int
) -> None:
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    rewrite(folder / "config.json", vocab_size=size + gap + 1)
    assert len(encode(folder, TURN)) > 1
    rewrite(folder / name, **DECLARED[name](size + gap))
    assert encode(folder, f"a{TURN}b")[1:-1] == [size + gap]
    model = TextModel.load(folder, "", 0)
    assert model.decode([size + gap]) == TURN
    compiler = GrammarCompiler.load(folder, size + gap + 1, {END})
    assert compiler is not None
    assert compiler.tokenizer.tokenize_str(TURN) == [size + gap]
    rewrite(folder / "tokenizer_config.json", eos_token=TURN)
    assert tokenizer_end_ids(folder) == {size + gap}


@pytest.mark.covers("K15")
def test_declared_tokens_leave_the_ids_of_others_alone(folder: Path) -> None:
    """Added tokens behind the vocabulary have the numbers that the file says."""
    first = larger(folder, special=False)
    rewrite(folder / "config.json", vocab_size=first + 2)
    extra = "<extra>"
    assert encode(folder, extra) == [first]
    rewrite(folder / "added_tokens.json", **{TURN: first + 1})
    assert encode(folder, extra + TURN) == [first, first + 1]


@pytest.mark.covers("K15")
@pytest.mark.parametrize("is_listed", [True, False])
def test_an_id_is_that_of_one_token_where_files_disagree(folder: Path, is_listed: bool) -> None:
    """added_tokens.json is the older file, and stays as it was when a fine-tune renames a token."""
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    rewrite(folder / "config.json", vocab_size=size + 2)
    rewrite(folder / "added_tokens.json", **{"<older>": size, "<kept>": size + 1})
    rewrite(
        folder / "tokenizer_config.json",
        added_tokens_decoder={str(size): {"content": TURN, "special": True}},
        additional_special_tokens=["<older>", TURN] if is_listed else [],
    )
    assert encode(folder, f"{TURN}<kept>") == [size, size + 1]
    assert size not in encode(folder, "<older>")
    tokenizer = Tokenizer.from_str(model_tokenizer(folder, size + 2, KeptFiles()))
    assert sorted(tokenizer.get_vocab().values()) == list(range(size + 2))


@pytest.mark.covers("K15")
@pytest.mark.parametrize("at", [5, 9999])
def test_an_id_that_another_token_has_or_the_model_lacks_is_not_taken(
    folder: Path, at: int
) -> None:
    before = encode(folder, TURN)
    rewrite(folder / "added_tokens.json", **{TURN: at})
    assert encode(folder, TURN) == before


SPECIAL = {
    "eos_token": EOS,
    "additional_special_tokens": [{"content": EOS}],
    "extra_special_tokens": {"end": EOS},
    "added_tokens_decoder": {"1": {"content": EOS, "special": True}},
}


@pytest.mark.covers("K15")
@pytest.mark.parametrize("kind", ["not special", "not added"])
@pytest.mark.parametrize("key", SPECIAL)
def test_a_token_is_special_where_any_file_says_so(folder: Path, key: str, kind: str) -> None:
    layout = json.loads((folder / "tokenizer.json").read_text())
    for one in layout["added_tokens"]:
        one["special"] = one["content"] != EOS
    if kind == "not added":
        layout["added_tokens"] = [one for one in layout["added_tokens"] if one["content"] != EOS]
    rewrite(folder / "tokenizer.json", **layout)
    template = "{{ messages[0]['content'] }}"
    rewrite(folder / "tokenizer_config.json", eos_token=None, chat_template=template)
    assert TextModel.load(folder, "", 0).decode([END, END]) == EOS + EOS
    rewrite(folder / "tokenizer_config.json", **{key: SPECIAL[key]})
    model = TextModel.load(folder, "", 0)
    assert model.decode([END, END]) == ""
    prompt = model.render_chat([{"role": "user", "content": EOS}])
    ids = model.encode(prompt, add_special_tokens=False, param="messages")
    assert END not in ids, "what a user writes is text"


def test_an_end_that_may_be_a_word_is_a_part_of_texts(folder: Path) -> None:
    rewrite(folder / "tokenizer_config.json", eos_token="Hello")
    before = encode(folder, "Hello world")
    rewrite(folder / "tokenizer_config.json", eos_token=None)
    assert encode(folder, "Hello world") == before


@pytest.mark.covers("K16")
@pytest.mark.parametrize("is_older", [True, False])
def test_roles_of_tokens_are_those_of_the_file_that_counts(folder: Path, is_older: bool) -> None:
    """The map counts for checkpoints that declare no tokens in their configuration."""
    rewrite(folder / "special_tokens_map.json", bos_token={"content": "<s>"}, unk_token="<unk>")
    rewrite(folder / "tokenizer_config.json", bos_token=BOS, eos_token=None)
    if not is_older:
        rewrite(folder / "tokenizer_config.json", added_tokens_decoder={})
    roles = special_tokens(folder, KeptFiles())
    assert roles == {"bos_token": "<s>" if is_older else BOS, "unk_token": "<unk>"}


@pytest.mark.covers("K16")
def test_a_template_has_the_tokens_of_the_map(folder: Path) -> None:
    asked = [{"role": "user", "content": "Hello"}]
    wanted = TextModel.load(folder, "", 0).render_chat(asked)
    rewrite(folder / "special_tokens_map.json", bos_token=BOS, eos_token=EOS)
    rewrite(folder / "tokenizer_config.json", bos_token=None, eos_token=None)
    assert wanted.startswith(BOS)
    assert TextModel.load(folder, "", 0).render_chat(asked) == wanted


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": ["<a>", None, {"content": 5}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": "<a>", "extra_special_tokens": 7}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "<a>"}}}),
        ("added_tokens.json", {"": 3, "<a>": None, "<b>": -1, "<c>": 1.5, "<d>": "x"}),
    ],
)
def test_what_declares_no_token_changes_nothing(
    folder: Path, name: str, fields: dict[str, Any]
) -> None:
    text = (folder / "tokenizer.json").read_text()
    rewrite(folder / name, **fields)
    assert model_tokenizer(folder, 320, KeptFiles()) == text


@pytest.mark.parametrize("added", [["<a>"], [{"id": 1}], [{"content": "<a>"}], 7])
def test_a_tokenizer_with_broken_tokens_is_named(folder: Path, added: Any) -> None:
    rewrite(folder / "tokenizer.json", added_tokens=added)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        tokenizer_end_ids(folder)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        TextModel.load(folder, "", 0)


VOCAB = {"a": 0, "b": 1, "ab": 2}


@pytest.mark.parametrize(
    "model",
    [
        None,
        7,
        {"vocab": {"a": "x"}},
        {"vocab": VOCAB, "merges": [5]},
        {"vocab": VOCAB, "merges": [["a"]]},
        {"vocab": [["a", 0.0], ["b", 0.0]], "merges": ["a b"]},
    ],
)
def test_a_tokenizer_with_a_broken_model_is_named(folder: Path, model: Any) -> None:
    rewrite(folder / "tokenizer.json", model=model)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        model_tokenizer(folder, 1, KeptFiles())
