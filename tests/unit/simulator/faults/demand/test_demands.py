"""Lengths, salts and grammars of requests, each with what must be noticed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from common.errors import InternalError, InvalidRequest, Overloaded
from common.nodes import Role
from simulator.faults import cluster
from simulator.faults.contents import (
    GRAMMAR_ENDS_AT,
    STOP_TOKEN_ID,
    forced_after,
    forced_token,
    right_answer,
)
from simulator.faults.demand.grammars import Compilations, grammar_of
from simulator.faults.demand.lengths import (
    check_too_long,
    fewest_tokens,
    may_be_too_long,
    tokens_wanted,
)
from simulator.faults.demand.salts import Salted, Salts
from simulator.faults.history import AskedRequest
from simulator.faults.shape import Shape, longest_of, problems_of
from tests.support.nodes.node_views import node
from tests.unit.simulator.faults.histories import (
    a_history,
    a_shape,
    an_asked_request,
    run,
)

UNEVEN = replace(a_shape(), pools=(40, 5, 11))
"""Its nodes hold 156, 16 and 40 tokens."""


def outcomes(shape: Shape, *asked: AskedRequest) -> dict[str, tuple[str, int]]:
    ended = run(a_history(shape, list(asked))).outcomes()
    return {name: (outcome, len(tokens)) for name, outcome, tokens in ended}


def test_a_request_is_too_long_for_nodes_that_are_too_small() -> None:
    assert [longest_of(UNEVEN, name) for name in ("prefill-0", "decode-0", "decode-1")] == [
        *(156, 16, 40)
    ]
    asked = an_asked_request(0.1, "r1", num_prompt=30, max_tokens=12)
    cut = replace(asked, is_cut=True, max_tokens=80)
    assert (tokens_wanted(asked), tokens_wanted(cut), tokens_wanted(cut, 5)) == (42, 31, 36)
    assert may_be_too_long(UNEVEN, asked, is_still=True)
    assert not may_be_too_long(UNEVEN, cut, is_still=True)
    assert may_be_too_long(UNEVEN, cut, is_still=False)
    assert not may_be_too_long(UNEVEN, replace(asked, max_tokens=1), is_still=True)
    assert fewest_tokens(UNEVEN, cut, is_still=True) == 10
    one = an_asked_request(0.2, "r2", num_prompt=60, max_tokens=1)
    found = outcomes(UNEVEN, asked, one, replace(cut, name="r3", seed=2))
    assert found["r1"] == ("invalid_request", 0)
    assert found["r2"][1] == 1
    assert found["r3"][1] <= 10


def test_a_node_that_holds_a_request_is_noticed() -> None:
    record = node("d", Role.DECODE).record
    wrong = InvalidRequest("too long")
    check_too_long("r1", wrong, record.max_model_len + 1, [record], is_one_token=False)
    check_too_long("r1", Overloaded("full"), 1, [record], is_one_token=False)
    with pytest.raises(InternalError, match="r1 is too long, and d#1 holds it"):
        check_too_long("r1", wrong, record.max_model_len, [record], is_one_token=False)


def test_pools_are_of_all_nodes() -> None:
    assert not problems_of(UNEVEN)
    assert problems_of(replace(UNEVEN, pools=(4,)))[0].startswith("1 pools: wanted none, or one")
    assert problems_of(replace(UNEVEN, pools=(4, 1, 4)))[0].startswith("pools: wanted 2 to")


def test_a_block_of_another_salt_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [an_asked_request(0.1 * i, f"r{i}", num_prompt=17, max_tokens=9) for i in range(3)]
    asked = [replace(one, num_shared=17, salt="s" * (i % 2)) for i, one in enumerate(asked)]
    assert len(outcomes(a_shape(), *asked)) == 3

    def of_others(
        requests: Iterable[Salted], block_size: int, fingerprints: Iterable[str]
    ) -> Salts:
        others = [one._replace(salt="t") if one.name == "r0" else one for one in requests]
        return Salts(others, block_size, fingerprints)

    monkeypatch.setattr(cluster, "Salts", of_others)
    with pytest.raises(InternalError, match="r0/1 of salt 't' has a block of salt"):
        outcomes(a_shape(), *asked)


def test_a_grammar_is_compiled_once_on_a_node() -> None:
    slow, late, refused = (grammar_of(name) for name in ("slow", "late", "refused"))
    assert slow is not None
    assert late is not None
    assert refused is not None
    compilations = Compilations()
    assert compilations.begin(grammar_of("")) is None
    assert compilations.begin(grammar_of("quick")) is None
    assert compilations.begin(slow) == 0.2
    assert compilations.end(slow) is None
    assert compilations.begin(slow) is None
    assert isinstance(compilations.end(late), Overloaded)
    assert compilations.begin(late) is None
    assert isinstance(compilations.end(refused), InvalidRequest)
    assert compilations.begin(refused) is not None


def test_answers_follow_their_grammars() -> None:
    answer = right_answer((3, 4, 5), 1, 9, has_grammar=True)
    forced = {index: forced_token(index) for index in range(9)}
    assert all(token in (None, answer[index]) for index, token in forced.items())
    assert forced_after(3 + 3, 3) == answer[3:5]
    assert forced_after(3, 3) == forced_after(3, None) == ()
    whole = right_answer((3, 4, 5), 1, 40, has_grammar=True)
    assert (len(whole), whole[-1]) == (GRAMMAR_ENDS_AT + 1, STOP_TOKEN_ID)
    assert forced_after(3 + GRAMMAR_ENDS_AT, 3) == (STOP_TOKEN_ID,), "nothing follows the end"
    asked = an_asked_request(0.1, "r1", max_tokens=9)
    found = outcomes(
        a_shape(), *(replace(asked, name=f"r-{g}", grammar=g) for g in ("slow", "refused"))
    )
    assert found["r-slow"] == ("length", 9)
    assert found["r-refused"] == ("invalid_request", 0)
