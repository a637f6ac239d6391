"""A whole node while a grammar is compiled: its request waits, the steps of others go on."""

from __future__ import annotations

import asyncio

import pytest

from common.grammar import Grammar, GrammarKind
from common.ids import Incarnation
from tests.support.engine import hash_grammars
from tests.support.engine.build import make_request
from tests.support.grammars.slow_compiler import WAIT_S, SlowCompiler
from tests.support.nodes.running_node import node_config, running_node

GRAMMAR = Grammar(GrammarKind.REGEX, "(ab|cd){2,5}")


@pytest.mark.covers("G13")
async def test_only_the_request_with_the_grammar_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = SlowCompiler()
    monkeypatch.setattr(hash_grammars, "compiler", lambda: compiler)
    async with running_node(node_config()) as node:
        first, second = (
            asyncio.create_task(
                node.answer(
                    make_request(5, name=name, max_tokens=12, grammar=GRAMMAR), Incarnation(name, 1)
                )
            )
            for name in ("first", "second")
        )
        assert await asyncio.to_thread(compiler.has_begun.wait, WAIT_S)
        free = await node.answer(make_request(7, name="free", max_tokens=12, ignore_eos=True))
        assert sum(len(output.token_ids) for output in free) == 12
        assert not first.done()
        compiler.let_go.set()
        texts = []
        for task in (first, second):
            outputs = await task
            texts.append(hash_grammars.text_of([t for one in outputs for t in one.token_ids]))
        assert all(len(text) >= 4 and set(text) <= set("abcd") for text in texts), texts
        assert compiler.compiled == [GRAMMAR], "both wait for one compilation"
