"""The client of the package `openai`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai

from tests.support.http.http_edge import Edge
from tests.support.http.http_server import served


@asynccontextmanager
async def client_of(edge: Edge, api_key: str = "unused") -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        served(edge.app) as port,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key=api_key,
            max_retries=0,
            timeout=60,
        ) as client,
    ):
        yield client
