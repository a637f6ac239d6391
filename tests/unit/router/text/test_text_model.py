"""Loading a model's text side: templates, defaults, and files that are broken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, processors

from common.errors import CheckpointError, ConfigError, InvalidRequest
from router.text.chat.chat_template import ChatTemplate
from router.text.text_model import TextModel, filters_of_nodes
from router.text.token_lookup import TokenBytes
from tests.support.http.edge_model import BOS, CONTEXT, EOS, write_model_folder

USER = [{"role": "user", "content": 'a <b> & "c"'}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "tiny-model")


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_names_and_limits(folder: Path) -> None:
    model = TextModel.load(folder, "", 0)
    assert (model.name, model.max_model_len) == ("tiny-model", CONTEXT)
    assert model.eos_token_ids == {1}
    model = TextModel.load(folder, "other", 100)
    assert (model.name, model.max_model_len) == ("other", 100)
    with pytest.raises(ConfigError, match=f"{CONTEXT + 1}.*at most {CONTEXT}"):
        TextModel.load(folder, "", CONTEXT + 1)


@pytest.mark.covers("K19")
def test_a_context_that_yarn_extends(folder: Path) -> None:
    """As nodes have it: requests of that length reach them."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT}
    rewrite(folder / "config.json", rope_scaling=scaling)
    assert TextModel.load(folder, "", 0).max_model_len == 4 * CONTEXT
    assert TextModel.load(folder, "", 4 * CONTEXT).max_model_len == 4 * CONTEXT
    with pytest.raises(ConfigError, match=f"{4 * CONTEXT + 1}: wanted at most {4 * CONTEXT}"):
        TextModel.load(folder, "", 4 * CONTEXT + 1)


def test_a_model_can_have_several_names(folder: Path) -> None:
    model = TextModel.load(folder, "first, second", 0)
    assert (model.name, model.names) == ("first", ("first", "second"))
    alone = TextModel.load(folder.rename(folder.with_name("a,b")), "", 0)
    assert (alone.name, alone.names) == ("a,b", ("a,b",))


def test_an_answer_ends_at_the_end_tokens_of_both_files(folder: Path) -> None:
    rewrite(folder / "generation_config.json", eos_token_id=[7])
    assert TextModel.load(folder, "", 0).eos_token_ids == {1, 7}


AROUND = {
    "nothing": ([], []),
    "its begin": ([BOS], []),
    "an end": ([], [EOS]),
    "both": ([BOS], [EOS]),
    "another token": ([EOS], []),
}


@pytest.mark.covers("K17")
@pytest.mark.parametrize("around", AROUND)
def test_texts_begin_as_the_configuration_of_the_tokenizer_says(folder: Path, around: str) -> None:
    before, after = AROUND[around]
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=[(BOS, 0), (EOS, 1)]
    )
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(path))
    for wanted in (None, True, False):
        rewrite(folder / "tokenizer_config.json", add_bos_token=wanted)
        model = TextModel.load(folder, "", 0)
        ids = model.encode("Hello", add_special_tokens=True, param="prompt")
        begin = before if wanted is None else [one for one in before if one != BOS]
        begin = [BOS, *begin] if wanted else begin
        assert [model.tokenizer.id_to_token(one) for one in ids] == [*begin, "Hello", *after]
    chat = model.encode(model.render_chat(USER), add_special_tokens=False, param="messages")
    assert chat.count(0) == 2, "a template's text is the whole prompt"


@pytest.mark.covers("K17")
@pytest.mark.parametrize("bos", ["<seed:bos>", "<s:1>", "$A", "$0", "<a:b:c>"])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_token_that_begins_texts_may_have_any_name(
    folder: Path, bos: str, wanted: bool
) -> None:
    """The library has a language of its own for what is put around texts."""
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace(json.dumps(BOS), json.dumps(bos)))
    if wanted:
        rewrite(path, post_processor=None)
    rewrite(folder / "tokenizer_config.json", add_bos_token=wanted, bos_token=bos)
    model = TextModel.load(folder, "", 0)
    ids = model.encode("Hello", add_special_tokens=True, param="prompt")
    assert [model.tokenizer.id_to_token(one) for one in ids] == [bos] * wanted + ["Hello"]


@pytest.mark.covers("K17")
@pytest.mark.parametrize("bos", [None, "<unheard of>"])
def test_a_begin_that_the_tokenizer_lacks_is_none(folder: Path, bos: str | None) -> None:
    rewrite(folder / "tokenizer_config.json", add_bos_token=True, bos_token=bos)
    ids = TextModel.load(folder, "", 0).encode("Hello", add_special_tokens=True, param="prompt")
    assert ids[0] == 0, "as tokenizer.json says"


Break = Callable[[Path], object]


def panic(tokenizer: Path) -> None:
    """Have the tokenizers library panic, which is no `Exception`: a prefix longer than a token."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    rewrite(tokenizer, model={**model, "continuing_subword_prefix": "####"})


BROKEN: list[tuple[str, Break]] = [
    ("config.json is missing", lambda f: (f / "config.json").unlink()),
    ("config.json cannot be read", lambda f: (f / "config.json").write_text("{")),
    ("config.json holds a list", lambda f: (f / "config.json").write_text("[]")),
    (
        "max_position_embeddings in .*config.json is missing",
        lambda f: (f / "config.json").write_text('{"vocab_size": 5}'),
    ),
    ("vocab_size in .*config.json is 'x'", lambda f: rewrite(f / "config.json", vocab_size="x")),
    ("vocab_size in .*config.json is missing", lambda f: (f / "config.json").write_text("{}")),
    ("tokenizer.json is missing", lambda f: (f / "tokenizer.json").unlink()),
    ("tokenizer.json cannot be read", lambda f: (f / "tokenizer.json").write_text("{}")),
    ("tokenizer.json cannot be read: .* out of range", lambda f: panic(f / "tokenizer.json")),
    (
        "chat template does not compile",
        lambda f: (f / "chat_template.jinja").write_text("{% if %}"),
    ),
    ("chat_template.jinja cannot be read", lambda f: (f / "chat_template.jinja").mkdir()),
    (
        "chat_template in .*tokenizer_config.json is a int",
        lambda f: rewrite(f / "tokenizer_config.json", chat_template=5),
    ),
    (
        "generation_config.json: temperature is -1",
        lambda f: rewrite(f / "generation_config.json", temperature=-1),
    ),
    (
        "generation_config.json: top_p is 'high': wanted a number",
        lambda f: rewrite(f / "generation_config.json", top_p="high"),
    ),
    (
        "generation_config.json: top_k is 50.5: wanted a whole number",
        lambda f: rewrite(f / "generation_config.json", top_k=50.5),
    ),
    (
        "generation_config.json: top_k is inf: wanted a whole number",
        lambda f: rewrite(f / "generation_config.json", top_k=float("inf")),
    ),
    (
        "generation_config.json: temperature is nan: wanted 0 to 100",
        lambda f: rewrite(f / "generation_config.json", temperature=float("nan")),
    ),
    (
        "generation_config.json: min_p is True: wanted a number",
        lambda f: rewrite(f / "generation_config.json", min_p=True),
    ),
    *(
        (f"config.json: eos_token_id is {re.escape(repr(wrong))}: wanted a token id or a list", b)
        for wrong in ("1", 1.0, True, [1, None])
        for b in (
            lambda f, wrong=wrong: rewrite(f / "generation_config.json", eos_token_id=wrong),
            lambda f, wrong=wrong: rewrite(f / "config.json", eos_token_id=wrong),
        )
    ),
]


def test_a_default_fits_the_wire_though_json_writes_it_with_a_point(folder: Path) -> None:
    rewrite(folder / "generation_config.json", top_k=50.0, temperature=1)
    defaults = TextModel.load(folder, "", 0).default_sampling
    assert defaults == {"top_k": 50, "temperature": 1}
    for value in defaults.values():
        assert type(value) is int, "a float does not fit the wire where a whole number is wanted"


@pytest.mark.covers("K05")
def test_defaults_that_keep_one_token_or_all_are_taken(folder: Path) -> None:
    rewrite(folder / "generation_config.json", top_k=-1, top_p=0.0)
    defaults = TextModel.load(folder, "", 0).default_sampling
    assert filters_of_nodes(defaults) == {"top_k": 1, "top_p": 1.0}
    assert filters_of_nodes({"top_k": -1}) == {"top_k": 0}


@pytest.mark.parametrize(("words", "break_it"), BROKEN, ids=[words for words, _ in BROKEN])
def test_broken_files_are_named(folder: Path, words: str, break_it: Break) -> None:
    break_it(folder)
    with pytest.raises(CheckpointError, match=words):
        TextModel.load(folder, "", 0)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none is not a folder"):
        TextModel.load(tmp_path / "none", "", 0)


def test_the_template_file_wins(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] | tojson }}")
    assert TextModel.load(folder, "", 0).render_chat(USER) == '"a <b> & \\"c\\""'


def test_the_default_of_several_templates(folder: Path) -> None:
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    rewrite(folder / "tokenizer_config.json", chat_template=several)
    assert TextModel.load(folder, "", 0).render_chat(USER) == "y"


def test_a_model_without_a_template_still_completes(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    model = TextModel.load(folder, "", 0)
    with pytest.raises(InvalidRequest, match="no chat template"):
        model.render_chat(USER)
    assert model.encode("Hello", add_special_tokens=False, param="prompt")


def render(source: str) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(USER)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{% if tools is none and documents is none %}bare{% endif %}", "bare"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}a{{ bos_token }}{% endgeneration %}b", "a<s>b"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ {'é': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "é": 1}'),
    ],
)
def test_what_templates_may_use(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 5 }}", "cannot render"),
        ("{{ messages[0]['content']|dictsort }}", "cannot render"),
        ("{{ 1 // (messages|length - 1) }}", "cannot render"),
        ("{{ messages[7]['role'] }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ bos_token.__init__.__globals__ }}", "refuses"),
    ],
)
def test_what_templates_may_not(source: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_padding_and_truncation_left_in_the_file_do_not_matter(folder: Path) -> None:
    before = TextModel.load(folder, "", 0).encode(
        "Hello lazy dog", add_special_tokens=True, param="p"
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    after = TextModel.load(folder, "", 0).encode(
        "Hello lazy dog", add_special_tokens=True, param="p"
    )
    assert after == before


@pytest.mark.covers("T06")
def test_the_bytes_of_a_byte_level_token(folder: Path) -> None:
    model = TextModel.load(folder, "", 0)
    seen = {model.describe_token(i).raw for i in range(model.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= seen
    for text in (" world", "é🙂", "<|im_end|>"):
        ids = model.encode(text, add_special_tokens=False, param="p")
        assert b"".join(model.describe_token(i).raw for i in ids) == text.encode()
    assert model.describe_token(10**6).raw == b""


@pytest.mark.covers("T06")
def test_the_bytes_of_sentencepiece_tokens() -> None:
    vocab = {"▁Hello": 0, "<0xF0>": 1, "é": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    token_bytes = TokenBytes(tokenizer)
    assert [token_bytes[i] for i in range(3)] == [b" Hello", b"\xf0", "é".encode()]
