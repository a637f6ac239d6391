"""OpenAI's `/v1/responses`, in the shape that its own client reads."""

from __future__ import annotations

from tests.fakes.http_edge import make_edge, says
from tests.fakes.tool_models import hermes_model


async def test_the_usage_has_every_count() -> None:
    edge = make_edge(says("Hello", num_cached=3), model=hermes_model())
    async with edge.client() as client:
        response = await client.post("/v1/responses", json={"input": "Hi"})
    usage = response.json()["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": 0}
    assert usage["input_tokens"] == len(edge.generator.calls[0].prompt_token_ids)
