"""Docstrings of functions begin with a verb, and public ones name the errors they raise.

Ruff's D401 requires the imperative mood of the verbs that it knows, and refuses articles. It passes
other words, so the first word must also be capitalised and none of `NO_VERBS`. Properties are
things: theirs may be noun phrases.

No docstring begins with "Of", and one of an attribute or a constant begins with a noun or an
article, not with a preposition: "Most characters of a name", not "Of a name". `place` names no
variable: an index is an `index`, an address an `address` or a `pointer`.

No docstring begins with "Those", "So many" or "Take that": it names the thing, and says what is
done with it. Nor does one begin with "Have x do y", which names no verb of the field.

What follows in a sequence comes after it: nothing stands "behind the last token". A client, a
sequence or a node is named, not "whoever".

The rule for errors: a function or method without a leading underscore, in a class without one,
whose own body has `raise SomeError` or `raise SomeError(...)`, has the word `SomeError` in its
docstring. It does not apply to functions inside functions; to `raise` alone and to the raise of a
bound value or of a function's result (lower case names), which pass on an error that was made
elsewhere; to `AssertionError` and `NotImplementedError`, which are bugs; nor to `StopIteration`'s
kind, by which an iterator ends.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import pytest

from tests.unit.tree import blocks, name_of, nodes, parsed, python_files

# Not part of what a caller can expect: bugs, and the end of an iterator.
UNNAMED = frozenset(
    {"AssertionError", "NotImplementedError", "StopAsyncIteration", "StopIteration"}
)
# First words of docstrings that describe instead of command.
NO_VERBS = re.compile(
    "All|And|As|Both|Each|Every|From|How|If|In|Inside|Its|No|None|Nothing|On|One|Only|Raises|"
    "Something|What|When|Where|Whether|Which|Who|Why|With|Without"
)

# First words of docstrings of attributes that leave out the noun.
NO_NOUNS = re.compile("At|Between|By|For|From|If|In|Of|To|Until|Up|When|Where|While|With")
# First words of docstrings that leave the subject, or the verb, to the reader.
NO_SUBJECTS = re.compile(r"(Have|Those|So (many|much)|Take (that|how|why|what|when|where))\b")
# Where `place` named an index or a pointer. Packages of `engine/runner` besides `kernels` follow.
WITHOUT_PLACES = (
    *("engine/core/", "engine/runner/kernels/", "node/", "protos/", "router/core/"),
    *("simulator/profiles/", "simulator/replays/"),
)

_WORDS = (
    "answers?|bytes|calls?|chunks?|commas?|copies|copy|deadline|drafts?|ends?|headers?|last|"
    "messages?|pieces?|prompts?|rows?|steps?|thinking|tokens?|writes?"
)
DIALECT = re.compile(
    rf"\bbehind (?:(?:the|a|an|each|every|all|its|their|first|last) )*(?:\w+ )?(?:{_WORDS})\b"
    r"|\bwhoever\b",
    re.IGNORECASE,
)

HAS_DIALECT = re.compile("behind|whoever", re.IGNORECASE)
"""What a source has if its prose, whose lines may be divided anywhere, matches `DIALECT`."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(tree: ast.Module | ast.ClassDef) -> Iterator[Function]:
    """Yield a module's or class's public functions, and those of its public classes."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            if isinstance(node, ast.ClassDef):
                yield from public_functions(node)
            else:
                yield node


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.ClassDef | ast.Lambda):
            yield child
            yield from own_nodes(child)


def raised_errors(function: Function) -> set[str]:
    """Return the names of the error classes that `function` itself raises."""
    names = set()
    for node in own_nodes(function):
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = ast.unparse(error).rpartition(".")[2]
            if name[:1].isupper():
                names.add(name)
    return names - UNNAMED


def is_property(function: Function) -> bool:
    """Return whether a decorator turns `function` into an attribute."""
    names = (ast.unparse(decorator).rpartition(".")[2] for decorator in function.decorator_list)
    return not {"property", "cached_property"}.isdisjoint(names)


def descriptions(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each function whose docstring does not begin with a verb, and how it begins."""
    for node in blocks(tree):
        if isinstance(node, Function) and not is_property(node):
            words = (ast.get_docstring(node, clean=False) or "Return").split()
            word = words[0].rstrip(",;:.")
            if not re.fullmatch("[A-Z][a-z]+", word) or NO_VERBS.fullmatch(word):
                yield node.name, " ".join(words[:6])


@cache
def documented(tree: ast.Module) -> list[tuple[str, str]]:
    """Return the docstring of each attribute and constant, behind the name that it documents."""
    found = []
    for node in blocks(tree):
        for one, following in pairwise(node.body):  # type: ignore[attr-defined]
            if isinstance(one, ast.Assign | ast.AnnAssign) and isinstance(following, ast.Expr):
                value = following.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    name = ast.unparse(one).partition(" =")[0].partition(":")[0]
                    found.append((name, value.value))
    return found


@cache
def docstrings(tree: ast.Module) -> list[tuple[str, str]]:
    """Return every docstring of a module, behind the name that it documents."""
    found = [
        (getattr(node, "name", "module"), (ast.get_docstring(node, clean=False) or "").strip())
        for node in blocks(tree)
        if isinstance(node, ast.Module | ast.ClassDef | Function)
    ]
    return found + documented(tree)


def without_nouns(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each docstring of an attribute that does not begin with a noun, and those with Of."""
    for name, text in docstrings(tree):
        if re.match(r"Of\b", text):
            yield name, text
    for name, text in documented(tree):
        if NO_NOUNS.fullmatch(text.split()[0].rstrip(",;:.")) and not text.startswith("Of "):
            yield name, text


def prose(source: str) -> Iterator[str]:
    """Yield the docstrings and the comments of a module."""
    for _, text in docstrings(parsed(source)):
        yield " ".join(text.split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def places(tree: ast.Module) -> list[str]:
    """Return the variables of a module that are called `place` or `places`."""
    return [
        node.id
        for node in nodes(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if node.id in ("place", "places")
    ]


def unnamed_errors(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each public function of a module with an error that its docstring does not name."""
    for function in public_functions(tree):
        words = set(re.findall(r"\w+", ast.get_docstring(function) or ""))
        for error in sorted(raised_errors(function) - words):
            yield function.name, error


def test_docstrings_begin_with_a_verb() -> None:
    described = [
        f"{name_of(path)}: {function}: {text}"
        for path in python_files()
        if not name_of(path).startswith("tests/")
        for function, text in descriptions(parsed(path.read_text()))
    ]
    assert not described, "\n".join(described)


def test_docstrings_say_the_noun() -> None:
    fragments = [
        f"{name_of(path)}: {name}: {text[:50]}"
        for path in python_files()
        if not name_of(path).startswith("tests/")
        for name, text in without_nouns(parsed(path.read_text()))
    ]
    assert not fragments, "\n".join(fragments)


def test_docstrings_name_their_subject() -> None:
    riddles = [
        f"{name_of(path)}: {name}: {text[:50]}"
        for path in python_files()
        if not name_of(path).startswith("tests/")
        for name, text in docstrings(parsed(path.read_text()))
        if NO_SUBJECTS.match(text)
    ]
    assert not riddles, "\n".join(riddles)


def test_no_docstring_begins_with_of() -> None:
    fragments = [
        f"{name_of(path)}: {name}: {text[:50]}"
        for path in python_files()
        for name, text in docstrings(parsed(path.read_text()))
        if re.match(r"Of\b", text)
    ]
    assert not fragments, "\n".join(fragments)


def test_prose_is_plain() -> None:
    found = [
        f"{name_of(path)}: {match[0]}"
        for path in python_files()
        if not name_of(path).startswith("tests/")
        if HAS_DIALECT.search(source := path.read_text())
        for text in prose(source)
        if (match := DIALECT.search(text))
    ]
    assert not found, "\n".join(found)


def test_tests_name_what_they_are_about() -> None:
    names = [
        node.name
        for path in python_files()
        if name_of(path).startswith("tests/")
        for node in blocks(parsed(path.read_text()))
        if isinstance(node, Function)
    ]
    assert [name for name in names if re.match("test_who(?:ever)?_", name)] == []


def test_an_index_is_no_place() -> None:
    found = [
        name_of(path)
        for path in python_files()
        if name_of(path).startswith(WITHOUT_PLACES) and places(parsed(path.read_text()))
    ]
    assert not found


def test_docstrings_name_the_errors_raised() -> None:
    unnamed = [
        f"{name_of(path)}: {function} raises {error}"
        for path in python_files()
        if not name_of(path).startswith("tests/")
        for function, error in unnamed_errors(parsed(path.read_text()))
    ]
    assert not unnamed, "\n".join(unnamed)


@pytest.mark.parametrize(
    ("source", "unnamed"),
    [
        ('def f():\n "Raise WrongKind."\n raise WrongKind("x")', []),
        ('def f():\n "Raise."\n raise kinds.WrongKind("x") from None', [("f", "WrongKind")]),
        ("def f():\n raise WrongKind", [("f", "WrongKind")]),
        ("class C:\n def f(self):\n  if x: raise WrongKind()", [("f", "WrongKind")]),
        ("class _C:\n def f(self):\n  raise WrongKind()", []),
        ("def _f():\n raise WrongKind()", []),
        ("def f():\n def g():\n  raise WrongKind()", []),
        ("def f():\n try: g()\n except WrongKind as error: raise\n else: raise error", []),
        ("def f():\n raise not_found(3)", []),
        ("def f():\n raise NotImplementedError", []),
    ],
)
def test_what_counts_as_unnamed(source: str, unnamed: list[tuple[str, str]]) -> None:
    assert list(unnamed_errors(ast.parse(source))) == unnamed


@pytest.mark.parametrize(
    ("source", "is_description"),
    [
        ('def f():\n "Return three."', False),
        ('def f():\n "Compile, then run."', False),
        ("def f(): ...", False),
        ('class C:\n @property\n def f(self):\n  "How many there are."', False),
        ('class C:\n @cached_property\n def f(self):\n  "How many there are."', False),
        ('class C:\n def f(self):\n  "Whether it is."', True),
        ('def f():\n "`x` is three."', True),
        ('def f():\n "Raises WrongKind."', True),
        ('def f():\n def g():\n  "What is left."', True),
    ],
)
def test_what_counts_as_a_description(source: str, is_description: bool) -> None:
    assert any(descriptions(ast.parse(source))) is is_description


@pytest.mark.parametrize(
    ("source", "is_fragment"),
    [
        ('MOST = 3\n"Of a name."', True),
        ('MOST = 3\n"By token: what is left."', True),
        ('class C:\n def f(self):\n  self.x: int = 3\n  "Where it begins."', True),
        ('def f():\n "Of three."', True),
        ('MOST = 3\n"Most characters of a name."', False),
        ('MOST = 3\n"The most."', False),
        ('MOST = 3\n"Offsets of rows."', False),
        ('def f():\n "Return three."', False),
    ],
)
def test_what_counts_as_a_fragment(source: str, is_fragment: bool) -> None:
    assert any(without_nouns(ast.parse(source))) is is_fragment


@pytest.mark.parametrize(
    ("text", "is_riddle"),
    [
        ("Those of one router.", True),
        ("So many steps are kept.", True),
        ("Take that a node has left.", True),
        ("Have a node leave.", True),
        ("The calls of one router.", False),
        ("Take a message.", False),
    ],
)
def test_what_counts_as_a_riddle(text: str, is_riddle: bool) -> None:
    assert bool(NO_SUBJECTS.match(text)) is is_riddle


def test_what_counts_as_a_place() -> None:
    assert places(ast.parse("for place in x: pass")) == ["place"]
    assert places(ast.parse("index = f(place=Place())")) == []


@pytest.mark.parametrize(
    ("source", "is_dialect"),
    [
        ('"""Sent behind the last piece."""', True),
        ("# rows behind the first wrong draft", True),
        ('def f():\n "Return what whoever asked gets."', True),
        ('"""What every endpoint behind the keys may answer."""', False),
        ('"""Sent after the last piece."""', False),
        ('error = "behind the last token"', False),
    ],
)
def test_what_counts_as_dialect(source: str, is_dialect: bool) -> None:
    assert any(map(DIALECT.search, prose(source))) is is_dialect
