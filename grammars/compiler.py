"""From a grammar and a tokenizer to a matcher of tokens, within limits.

A matcher's state is a function of the grammar and of the tokens that it has consumed. So it
can be made again from the tokens: by another node, for a resumed sequence, for a retry.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.errors import InternalError, InvalidRequest
from common.files.kept_files import KeptFiles
from common.files.tokenizer_files import model_tokenizer, naming
from common.grammar import Grammar, GrammarKind
from common.observing.histogram import Histogram, HistogramView
from grammars.bounds import MAX_OPTIONAL, check_bounds, check_lark
from grammars.endless.endless_rules import endless_rules
from grammars.heap import allocated_bytes
from grammars.kept import KeptGrammars
from grammars.own_stack import on_own_stack
from grammars.parts import GrammarParts, SchemaPart
from grammars.places import SchemaTrials, place_of
from grammars.texts import as_lark, compiled_text, json_rule, schema_of
from grammars.weaker_schemas import Weakening

STACK_BYTES = 32 << 20
"""Stack of the thread that compiles: more than any trial may take."""
COMPILE_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Bounds of the histogram of compilations."""
_MAX_PROBLEM_CHARS = 400
_MOST_NAMED = 8
"""Rules that a problem names."""
_MOST_TRIED = 256
"""Terminals of which it is found out whether they have a text: each takes a millisecond."""
_DEAD_END = "NoExtensionBias"
"""How llguidance says that nothing may follow here, neither a token nor the end."""
_NO_VALUES = "Unsatisfiable schema: anyOf is empty"
"""How it says that a schema is one without values, as `endless` writes them."""
_NO_TEXT = "no text follows it"
_ONE_OF = "oneOf constraints are not supported"
"""How it says that choices may share a value; what it adds is about options that clients lack."""
_SHARING = "the choices of oneOf are not known to exclude each other: wanted anyOf"
_BEYOND_LIMITS = re.compile(
    r"[0-9]+ items; max is|[Tt]oo many (items|states|expressions)|fuel exhausted"
)
"""How llguidance says that its limits do not allow more."""

NAMES = {
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.LARK: "grammar",
}
_REPEATED = re.compile(r"^ *[0-9]+ \| ", re.MULTILINE)
_PLACE_OF_JSON = re.compile(r"^at [0-9]+\([0-9]+\): failed to compile JSON schema: ")


def limits_of(initial_lexer_fuel: int) -> LLParserLimits:
    # Work is counted in the library's own units, not in time: every process refuses the same.
    return LLParserLimits(
        initial_lexer_fuel=initial_lexer_fuel,  # of a compilation: 50,000 take a millisecond
        step_lexer_fuel=200_000,  # of a mask: 14,000 take a millisecond
        step_max_items=50_000,
        max_lexer_states=50_000,  # 1 to 2 kB each
        max_grammar_size=200_000,
        max_items_in_row=5 * MAX_OPTIONAL,  # an optional property takes 4
        verbose_errors=False,
    )


_BYTES = [bytes([byte]) for byte in range(0xF5) if byte not in (0xC0, 0xC1)]
"""The bytes of UTF-8, each as `bytes`."""

LIMITS = limits_of(1_000_000)
_TRIAL_LIMITS = limits_of(20_000)
"""Limits of a compilation that looks for the place of a problem: most come before the lexer is
built."""


class GrammarCompiler:
    """Makes matchers for one tokenizer. Threads may share it."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        added_texts: Iterable[str] = (),
        weigh: Callable[[Grammar], int] | None = None,
    ) -> None:
        """Compile for `tokenizer`, whose added tokens have `added_texts`.

        `weigh` returns how many bytes a grammar takes when it is compiled, or raises what is wrong
        with it, before it is compiled in this process; otherwise the process is weighed.
        """
        self.tokenizer = tokenizer
        self._added_texts = tuple(added_texts)
        self._weigh = weigh
        self._lock = Lock()
        self._kept = KeptGrammars()
        self._under_way: dict[Grammar, Future[LLMatcher]] = {}
        self._compile_s = {kind.value: Histogram(COMPILE_BOUNDS_S) for kind in GrammarKind}
        self._lookups = dict.fromkeys(("cached", "compiled", "refused"), 0)

    @classmethod
    def load(
        cls,
        folder: Path,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        weigh: Callable[[Grammar], int] | None = None,
        files: KeptFiles | None = None,
    ) -> GrammarCompiler | None:
        """Read the tokenizer of a checkpoint; None where there is none, or no end token.

        Raises `CheckpointError` when it cannot be read.
        """
        files = KeptFiles() if files is None else files
        path, ends = folder / "tokenizer.json", sorted(eos_token_ids)
        if not files.has(path) or not ends:
            return None
        with naming(path):
            text = model_tokenizer(folder, vocab_size, files)
            added = json.loads(text).get("added_tokens") or []
            texts = [str(one["content"]) for one in added]
            tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
        return cls(tokenizer, texts, weigh)

    @cached_property
    def writes_every_byte(self) -> bool:
        """Whether the tokens can write any text: most vocabularies have a token for each byte."""
        write, read = self.tokenizer.tokenize_bytes, self.tokenizer.decode_bytes
        return all(read(write(byte)) == byte for byte in _BYTES)

    @property
    def num_cached(self) -> int:
        """Compiled grammars that are kept."""
        return len(self._kept)

    @property
    def cached_bytes(self) -> int:
        """What the compiled grammars that are kept weigh."""
        return self._kept.num_bytes

    def bytes_of(self, grammar: Grammar) -> int:
        """Return what a grammar that is kept weighs."""
        return self._kept.bytes_of(grammar)

    def lookups(self) -> dict[str, int]:
        """Return how many matchers were asked for, by result: cached, compiled or refused.

        One that waited for the compilation of another one counts as cached if that succeeded.
        """
        return dict(self._lookups)

    def compile_s(self) -> dict[str, HistogramView]:
        """Return the seconds of all compilations, by kind, also of grammars that were refused."""
        return {kind: one.view() for kind, one in self._compile_s.items()}

    def hold(self, grammar: Grammar) -> bool:
        """Keep a compiled grammar as long as this object lives; False: it is not compiled."""
        return self._kept.hold(grammar)

    def kept(self, grammar: Grammar) -> LLMatcher:
        """Return a matcher that has consumed nothing, of a grammar that a request holds.

        Never compiles. Raises `InternalError` where it is not kept.
        """
        found = self._kept.get(grammar, is_held=True)
        if found is None:
            raise InternalError("the grammar of a request is not compiled when it is needed")
        with self._lock:
            self._lookups["cached"] += 1
        return found.deep_copy()

    def count_followed(self, grammar: Grammar, num_tokens: int) -> None:
        """Note that so many more tokens are drawn under a grammar, which it grows by."""
        self._kept.count_followed(grammar, num_tokens)

    def grow(self, grammar: Grammar, num_bytes: int) -> None:
        """Note that a mask made a grammar larger. Raises `Overloaded` where there is no room."""
        self._kept.grow(grammar, num_bytes)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Return a matcher that has consumed nothing.

        A grammar that another thread compiles is waited for, and not compiled twice. Raises
        `InvalidRequest` for a grammar that cannot be followed, naming the place in a schema.
        """
        with self._lock:
            found = self._kept.get(grammar)
            others = self._under_way.get(grammar)
            if found is not None:
                self._lookups["cached"] += 1
            elif others is None:
                ours = self._under_way[grammar] = Future[LLMatcher]()
        if found is None and others is not None:
            found = self._waited_for(others, grammar)
        elif found is None:
            found = self._compiled_for_all(grammar, ours)
        return found.deep_copy()

    def check(self, grammar: Grammar, parts: GrammarParts) -> Grammar:
        """Return the grammar that can be followed in place of `grammar`, most often itself.

        From the schemas that are lenient the parts are left out that cannot be enforced. Raises
        `InvalidRequest`, with the part at fault, for what cannot be followed otherwise.
        """
        if parts.asked is not None and parts.asked.kind is GrammarKind.JSON_SCHEMA:
            schema_of(parts.asked)
        for part in parts.schemas:
            if not part.is_lenient:
                check_bounds(part.schema, part.source, called=f"the JSON schema of {part.source}")
        may_be_empty = [part for part in parts.schemas if part.may_be_empty]
        grammar = self._with_texts(grammar, may_be_empty[:_MOST_TRIED])
        try:
            self.matcher(grammar)
        except InvalidRequest:
            if parts.asked is not None:
                self.matcher(parts.asked)
            weaker_one = self._with_texts(self._weaker(grammar, parts.schemas), parts.schemas)
            if weaker_one != grammar:
                with suppress(InvalidRequest):
                    self.matcher(weaker_one)
                    return weaker_one
            if parts.schemas:
                self._refuse_part(weaker_one, parts.schemas)
            raise
        return grammar

    def _weaker(self, grammar: Grammar, schemas: Iterable[SchemaPart]) -> Grammar:
        """Return `grammar` with schemas in place of the lenient ones that can be followed."""
        text = grammar.text

        def fails(schema: Mapping[str, Any]) -> bool:
            rule = json_rule(schema, is_lenient=True)
            return bool(_problem(self.compile_text(f"start: {rule}", LIMITS)))

        weakening = Weakening(fails)
        for part in schemas:
            if part.is_lenient and not part.terminal and fails(part.schema):
                rule = json_rule(part.schema, is_lenient=True)
                kept = {"type": "object"} if part.schema.get("type") == "object" else {}
                made = kept | weakening.of(part.schema)
                text = text.replace(rule, json_rule(made, is_lenient=True))
        return replace(grammar, text=text)

    def _with_texts(self, grammar: Grammar, schemas: Iterable[SchemaPart]) -> Grammar:
        """Return `grammar` with weaker terminals in place of those that cannot be followed.

        Raises `InvalidRequest` for one of a schema that is not lenient.
        """
        text = grammar.text
        problems: dict[str, str] = {}
        for part in schemas:
            if not part.terminal:
                continue
            if part.terminal not in problems:
                tried = f"start: TRIED\nTRIED: {part.terminal}\n"
                problems[part.terminal] = _problem(self.compile_text(tried, LIMITS))
            problem = problems[part.terminal]
            if problem and not part.is_lenient:
                place = "#/pattern" if "pattern" in part.schema else "#"
                raise InvalidRequest(
                    f"the JSON schema of {part.source} cannot be followed: {place}: {problem}",
                    param=part.source,
                )
            if problem:
                text = text.replace(f": {part.terminal}\n", f": {part.weaker}\n")
        return replace(grammar, text=text)

    def forget(self, grammar: Grammar) -> None:
        """Drop a compiled grammar: the next request with it compiles it again.

        Matchers of one compilation share the states of their lexer, and the limit of these states
        counts those of all.
        """
        self._kept.forget(grammar)

    def _compiled_for_all(self, grammar: Grammar, compilation: Future[LLMatcher]) -> LLMatcher:
        """Compile a grammar; all that wait for `compilation` get the result or the error."""
        try:
            found, num_bytes = self._timed(grammar)
            self._kept.keep(grammar, found, num_bytes)
        except BaseException as error:
            with self._lock:
                del self._under_way[grammar]
            compilation.set_exception(error)
            raise
        with self._lock:
            del self._under_way[grammar]
        compilation.set_result(found)
        return found

    def _waited_for(self, compilation: Future[LLMatcher], grammar: Grammar) -> LLMatcher:
        """Return what another thread compiles; the field that an error names is this grammar's."""
        result = "refused"
        try:
            found = compilation.result()
            result = "cached"
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param=grammar.source or None) from error
        finally:
            with self._lock:
                self._lookups[result] += 1
        return found

    def _timed(self, grammar: Grammar) -> tuple[LLMatcher, int]:
        began_s, result = time.perf_counter(), "refused"
        try:
            found = self._weighed(grammar)
            result = "compiled"
        finally:
            with self._lock:
                self._lookups[result] += 1
                self._compile_s[grammar.kind.value].observe(time.perf_counter() - began_s)
        return found

    def _weighed(self, grammar: Grammar) -> tuple[LLMatcher, int]:
        """Compile a grammar and return how many bytes it takes."""
        if self._weigh is not None:
            num_bytes = self._weigh(grammar)
            return on_own_stack(STACK_BYTES, lambda: self._compiled(grammar)), num_bytes
        before = allocated_bytes()
        found = self._compiled(grammar)
        return found, max(0, allocated_bytes() - before)

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        if grammar.kind is GrammarKind.LARK:
            check_lark(grammar.text, grammar.source)
        lark = as_lark(grammar, "start")
        matcher = self.compile_text(lark, LIMITS)
        problem = _problem(matcher)
        if grammar.kind is GrammarKind.LARK and _may_be_endless(problem):
            problem = _endless(grammar.text) or problem
        if problem:
            if grammar.kind is GrammarKind.JSON_SCHEMA:
                place = place_of(schema_of(grammar), self._trials(lark, problem))
                problem = f"{place}: {problem}"
            raise InvalidRequest(
                f"the {NAMES[grammar.kind]} cannot be followed: {problem}",
                param=grammar.source or None,
            )
        return matcher

    def _refuse_part(self, grammar: Grammar, schemas: Iterable[SchemaPart]) -> None:
        """Raise `InvalidRequest` for the schema that is why there is no `grammar`, if one is."""
        lark = as_lark(grammar, "start")
        problem = _problem(self.compile_text(lark, LIMITS))
        trials = self._trials(lark, problem)
        for part in schemas:
            if not part.terminal and trials.is_at_fault(part.schema, is_lenient=part.is_lenient):
                place = place_of(part.schema, trials, is_lenient=part.is_lenient)
                raise InvalidRequest(
                    f"the JSON schema of {part.source} cannot be followed: {place}: {problem}",
                    param=part.source,
                )

    def _trials(self, lark: str, problem: str) -> SchemaTrials:
        """Return a search for the part with the `problem` that the whole grammar has."""
        is_cheap = _problem(self.compile_text(lark, _TRIAL_LIMITS)) == problem

        def has_problem(schema: Mapping[str, Any], is_lenient: bool) -> bool:
            tried = f"start: {json_rule(schema, is_lenient=is_lenient)}"
            limits = _TRIAL_LIMITS if is_cheap else LIMITS
            return _problem(self.compile_text(tried, limits)) == problem

        return SchemaTrials(has_problem, are_cheap=is_cheap)

    def compile_text(self, lark: str, limits: LLParserLimits) -> LLMatcher:
        """Return a matcher of a grammar in Lark's form, whose error says why it is none."""
        text = compiled_text(lark, self._added_texts)
        return LLMatcher(self.tokenizer, text, log_level=0, limits=limits)


def is_beyond_limits(problem: str) -> bool:
    """Return whether a matcher's `problem` is that its grammar takes more than the limits allow."""
    return bool(_BEYOND_LIMITS.search(problem))


def _may_be_endless(problem: str) -> bool:
    """Return whether a grammar with this `problem`, or with none, was read without an error."""
    return not problem or problem == _NO_TEXT or is_beyond_limits(problem)


def _endless(lark: str) -> str:
    """Return which rules of a grammar never end; "" where each can."""
    names = endless_rules(lark)
    if not names:
        return ""
    told = ", ".join([*names[:_MOST_NAMED], "…"] if len(names) > _MOST_NAMED else names)
    kind, verb = ("rule", "has") if len(names) == 1 else ("rules", "have")
    return f"the {kind} {told[:_MAX_PROBLEM_CHARS]} {verb} no text with an end"


def _problem(matcher: LLMatcher) -> str:
    """Return why nothing can follow a grammar, without what the library repeats; "" if it can."""
    if not matcher.is_error():
        # Some grammars without any text, such as a rule that is itself, fail at the first mask, and
        # some that are too large after the first text that must come.
        matcher = matcher.deep_copy()
        allowed = matcher.compute_bitmask()
        if not matcher.is_error():
            if not any(allowed):
                return _NO_TEXT
            matcher.consume_tokens(matcher.compute_ff_tokens())
            if not matcher.is_stopped():
                matcher.compute_bitmask()
        if not matcher.is_error():
            return ""
    text = " ".join(_REPEATED.split(matcher.get_error())[0].split())
    if text.startswith(_DEAD_END):
        return _NO_TEXT
    text = _PLACE_OF_JSON.sub("", text)
    if text.startswith(_NO_VALUES):
        return _NO_TEXT
    if text.startswith(_ONE_OF):
        return _SHARING
    return text if len(text) <= _MAX_PROBLEM_CHARS else f"{text[:_MAX_PROBLEM_CHARS]}…"
