"""What clients ask for: never less than they got, prompts equal where the trace says so."""

from __future__ import annotations

from simulator.clients import (
    FILLER_TOKEN_ID,
    MAX_TOKENS_CHOICES,
    STOP_TOKEN_ID,
    client_requests,
    prompt_of,
)
from simulator.trace_file import TraceRequest

REQUESTS = [TraceRequest(float(i), 100 + i, 1 + 7 * i % 3000) for i in range(400)]


def test_nobody_asks_for_less_than_the_answer_or_more_than_fits() -> None:
    clients = client_requests(REQUESTS, max_model_len=3300, seed=3)
    for client in clients:
        assert client.trace.num_output <= client.max_tokens <= 3300 - client.trace.num_prompt
    unclipped = {c.max_tokens for c in clients if c.max_tokens + c.trace.num_prompt < 3300}
    assert unclipped <= set(MAX_TOKENS_CHOICES)
    assert len(unclipped) > 2
    assert {client.priority for client in clients} == {-1, 0, 1}


def test_the_true_length_is_not_what_is_asked_for() -> None:
    clients = client_requests(REQUESTS, max_model_len=100_000, seed=0)
    assert not any(client.max_tokens == client.trace.num_output for client in clients)


def test_what_is_too_long_for_the_context_is_refused_and_changes_nobody_else() -> None:
    requests = [TraceRequest(0.0, 60, 9941), TraceRequest(1.0, 60, 40), TraceRequest(2.0, 60, 5)]
    clients = client_requests(requests, max_model_len=10_000, seed=1)
    assert [client.index for client in clients] == [1, 2]
    more = client_requests(requests, max_model_len=10_001, seed=1)
    assert [client.index for client in more] == [0, 1, 2]
    assert [c.priority for c in clients] == [c.priority for c in more[1:]]


def test_a_seed_decides() -> None:
    def asked(seed: int) -> list[tuple[int, int]]:
        clients = client_requests(REQUESTS, max_model_len=100_000, seed=seed)
        return [(client.max_tokens, client.priority) for client in clients]

    assert asked(1) == asked(1)
    assert asked(1) != asked(2)


def test_equal_hash_ids_are_equal_tokens_and_nothing_else_is() -> None:
    first = prompt_of(TraceRequest(0.0, 1200, 1, (5, 9, 2)), 0).token_ids
    second = prompt_of(TraceRequest(0.0, 1100, 1, (5, 9, 7)), 1).token_ids
    assert (len(first), len(second)) == (1200, 1100)
    assert first[:1024] == second[:1024]
    assert not set(first[1024:]) & set(second[1024:])
    alone = [prompt_of(TraceRequest(0.0, 64, 1), index).token_ids for index in (0, 5, 9)]
    tokens = {token for prompt in (*alone, first, second) for token in prompt}
    assert len(tokens) == 3 + 4
    assert not tokens & {FILLER_TOKEN_ID, STOP_TOKEN_ID}


def test_a_request_tells_the_length_of_its_answer_by_its_seed() -> None:
    (client,) = client_requests([TraceRequest(0.0, 10, 4)], max_model_len=100, seed=0)
    request = client.generation_request()
    assert (request.sampling.seed, len(request.prompt_token_ids)) == (4, 10)
    assert request.sampling.stop_token_ids == (STOP_TOKEN_ID,)
