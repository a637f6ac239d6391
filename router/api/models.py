"""`/v1/models`: the model that is served, under each of its names."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException

from router.api.answers.shapes import ModelCard, ModelList
from router.api.planning.planner import check_model
from router.http.api_texts import MODELS
from router.http.described import COMMON_ERRORS, error_responses, good_response
from router.http.exchange import JsonAnswer
from router.http.routes import Access, open_to
from router.text.text_model import TextModel


def add_model_routes(app: FastAPI, text_model: TextModel, max_model_len: Callable[[], int]) -> None:
    """Add the routes to `app`; `max_model_len` tells what a node that is alive can hold."""
    created_s = int(time.time())

    def card(name: str) -> ModelCard:
        return {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "pdserve",
            "max_model_len": max_model_len(),
        }

    @app.get(
        "/v1/models",
        summary="The model that is served, under each of its names",
        tags=[MODELS],
        responses=good_response(ModelList) | COMMON_ERRORS,
    )
    @open_to(Access.KEY)
    async def list_models() -> JsonAnswer:
        cards = [card(name) for name in text_model.names]
        models: ModelList = {"object": "list", "data": cards}
        return JsonAnswer(models)

    # Any name is valid: declared to the framework, it would be described with a status 422.
    path = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}

    @app.get(
        "/v1/models/{name:path}",
        summary="One model",
        tags=[MODELS],
        responses=good_response(ModelCard) | COMMON_ERRORS | error_responses(404),
        openapi_extra={"parameters": [path]},
    )
    @open_to(Access.KEY)
    async def one_model(request: Request) -> JsonAnswer:
        name: str = request.path_params["name"]
        if not name:  # the list, with a slash too many
            raise HTTPException(404)
        check_model(name, text_model)
        return JsonAnswer(card(name))
