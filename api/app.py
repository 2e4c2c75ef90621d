"""The application: paths to endpoints, errors to replies."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graphrt.api.auth_gate import Gate
from graphrt.api.body import on_body_refused
from graphrt.api.body_budget import BodyRefused
from graphrt.api.chat import ChatEndpoint
from graphrt.api.completions import CompletionEndpoint
from graphrt.api.cors import cors_middleware
from graphrt.api.debug_routes import DebugRoutes
from graphrt.api.docs_routes import DocsRoutes
from graphrt.api.error_net import ErrorNet
from graphrt.api.errors import error_response, on_http_exception
from graphrt.api.info_routes import InfoRoutes
from graphrt.api.request_log import RequestLog
from graphrt.api.state import AppState
from graphrt.api.tokenize import TokenizeRoutes
from graphrt.errors import EngineDead, RequestError


def create_app(state: AppState) -> Starlette:
    """The ASGI application that serves `state`."""

    async def on_error(request: Request, error: Exception) -> Response:
        full = isinstance(error, RequestError) and error.status == 429
        return error_response(error, {"retry-after": str(state.settings.retry_after_s)} if full else None)

    routes = [
        Route("/v1/chat/completions", ChatEndpoint(state), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(state), methods=["POST"]),
        *TokenizeRoutes(state).routes(),
        *DebugRoutes(state).routes(),
        *DocsRoutes(state).routes(),
        *InfoRoutes(state).routes(),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(RequestLog, metrics=state.metrics, paths=[route.path for route in routes]),
            *cors_middleware(state.settings.cors_origins),
            Middleware(ErrorNet),
            Middleware(
                Gate,
                ring=state.keys,
                limiter=state.limiter,
                guard_metrics=state.settings.guard_metrics,
                timeout_s=state.settings.request_timeout_s,
                refused=state.metrics.refused,
                by_key=state.metrics.by_key,
            ),
        ],
        exception_handlers={
            HTTPException: on_http_exception,
            BodyRefused: on_body_refused,
            RequestError: on_error,
            EngineDead: on_error,
        },
    )
