"""The small pages: what is served, how it is doing, its numbers."""

from __future__ import annotations

from typing import Literal

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from graphrt import __version__
from graphrt.api.example import curl_example
from graphrt.api.reply_schema import Health, ModelCard, ModelList, Version
from graphrt.api.state import AppState


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class InfoRoutes:
    """Endpoints that only read the state."""

    def __init__(self, state: AppState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/", self.front),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
        ]

    def _card(self) -> ModelCard:
        state = self._state
        return ModelCard(state.settings.model_name, state.created, state.engine.info.context)

    async def models(self, request: Request) -> Response:
        """The list of the one model."""
        return _json(ModelList([self._card()]))

    async def model(self, request: Request) -> Response:
        """The model by its name, which may hold slashes."""
        self._state.check_model(request.path_params["name"])
        return _json(self._card())

    async def health(self, request: Request) -> Response:
        """200 while requests are taken, 503 with the reason otherwise."""
        return self._status("ok")

    async def ready(self, request: Request) -> Response:
        """The same for balancers: whether to send requests here."""
        return self._status("ready")

    def _status(self, good: Literal["ok", "ready"]) -> Response:
        if not self._state.engine.alive:
            return _json(Health("dead", self._state.engine.death_reason), 503)
        if self._state.draining:
            return _json(Health("draining", "the server is shutting down"), 503)
        return _json(Health(good))

    async def version(self, request: Request) -> Response:
        """Of the server."""
        return _json(Version(__version__))

    async def metrics(self, request: Request) -> Response:
        """All numbers in Prometheus' text format."""
        return Response(self._state.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def front(self, request: Request) -> Response:
        """What this is, for somebody who opens it in a browser."""
        state = self._state
        info = state.engine.info
        url = str(request.base_url).rstrip("/")
        return PlainTextResponse(
            f"graphrt {__version__}: an OpenAI-compatible server for language models\n\n"
            f"model    {state.settings.model_name} ({info.architecture}) on {info.device}\n"
            f"context  {info.context} tokens, {info.max_batch} sequences at once\n"
            f"base url for OpenAI clients: {url}/v1\n"
            "paths    /v1/chat/completions  /v1/completions  /v1/models  /tokenize  /detokenize\n"
            "         /health  /ready  /version  /metrics  /debug/steps  /docs  /openapi.json\n\n"
            f"{curl_example(url, state.settings.model_name, state.keys.required)}\n"
        )
