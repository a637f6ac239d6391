"""KV with contents: an answer changes with any slot that is not what it should be."""

from __future__ import annotations

import pytest

from simulator.faults import contents
from simulator.faults.contents import KVMemory, right_answer, states_of, token_of, total_of

PROMPT = contents.prompt_of(1, 4, 10, 7)


def test_the_sum_of_what_was_written_is_that_of_the_tokens() -> None:
    memory, table = KVMemory(8, 0, 4), [5, 2, 7]
    states = states_of(PROMPT)
    for layer in range(contents.NUM_LAYERS):
        memory.write(layer, table, 0, states[:6])
        memory.write(layer, table, 6, states[6:])
    assert memory.total(table, 10) == total_of(states)
    assert memory.state_before(table, 6) == states[5]
    assert memory.state_before(table, 0) == contents.FIRST_STATE
    assert memory.of_block(5) == contents.values_of(states[:4])


@pytest.mark.parametrize("layer", range(contents.NUM_LAYERS))
@pytest.mark.parametrize("position", [0, 3, 4, 9])
def test_one_wrong_slot_changes_the_sum(layer: int, position: int) -> None:
    memory, table = KVMemory(8, 0, 4), [5, 2, 7]
    for one in range(contents.NUM_LAYERS):
        memory.write(one, table, 0, states_of(PROMPT))
    right = memory.total(table, 10)
    block, slot = table[position // 4], position % 4
    slots = memory.slots[layer][block]
    memory.put(layer, [block], [(*slots[:slot], slots[slot] + 1, *slots[slot + 1 :])])
    assert memory.total(table, 10) != right


def test_a_log_probability_follows_from_what_is_read_before_its_token() -> None:
    found = contents.logprobs_of(PROMPT, 1)
    assert len(set(found)) == len(PROMPT) - 1
    for place, number in enumerate(found, 1):
        assert number == contents.logprob_of(total_of(states_of(PROMPT[:place])), place) <= 0
    assert contents.logprobs_of(PROMPT, 7) == found[6:]
    assert contents.logprobs_of((*PROMPT[:4], 9, *PROMPT[5:]), 1)[4:] != found[4:]


def test_swapped_blocks_come_back() -> None:
    memory, table = KVMemory(8, 4, 4), [5, 2, 7]
    for layer in range(contents.NUM_LAYERS):
        memory.write(layer, table, 0, states_of(PROMPT))
    right = memory.total(table, 10)
    memory.swap_out([5, 2, 7], [3, 0, 1])
    memory.spoil(range(8))
    memory.swap_in([3, 0, 1], [1, 6, 4])
    assert memory.total([1, 6, 4], 10) == right


def test_an_answer_goes_on_from_any_of_its_tokens() -> None:
    answer = right_answer(PROMPT, 3, 12)
    for count in range(len(answer)):
        total = total_of(states_of((*PROMPT, *answer[:count])))
        assert token_of(total, 3, len(PROMPT) + count) == answer[count]
    assert right_answer(PROMPT, 2, 12) != answer
    assert right_answer(PROMPT, 3, 5) == answer[:5]


def test_some_answers_end_by_their_stop_token() -> None:
    answers = [right_answer(PROMPT, seed, 60) for seed in range(60)]
    ended = [one for one in answers if one[-1] == contents.STOP_TOKEN_ID]
    assert 5 < len(ended) < 60
    assert all(contents.STOP_TOKEN_ID not in one[:-1] for one in answers)


def test_prompts_of_a_group_begin_alike_and_go_on_otherwise() -> None:
    one, other = contents.prompt_of(1, 8, 12, 1), contents.prompt_of(1, 8, 20, 2)
    assert one[:8] == other[:8]
    assert one[8:] != other[8:12]
    assert contents.prompt_of(2, 8, 12, 1)[:8] != one[:8]


def test_kv_of_another_revision_is_wrong() -> None:
    memories = [KVMemory(8, 0, 4, revision=revision) for revision in (0, 1)]
    states, table = states_of(PROMPT), [5, 2, 7]
    for memory in memories:
        for layer in range(contents.NUM_LAYERS):
            memory.write(layer, table, 0, states)
        assert memory.total(table, 10) == total_of(states)
        assert memory.state_before(table, 10) == states[-1]
    first, second = memories
    assert second.of_block(5) == contents.values_of(states[:4], 1)
    for layer in range(contents.NUM_LAYERS):
        second.put(layer, table[:1], first.read(layer, table[:1]))
    assert second.total(table, 10) != total_of(states)
