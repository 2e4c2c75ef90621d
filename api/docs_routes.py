"""GET /openapi.json and GET /docs."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from graphrt.api.docs_page import make_page
from graphrt.api.openapi import make_document
from graphrt.api.state import AppState


class DocsRoutes:
    """The document is made when it is first asked for."""

    def __init__(self, state: AppState) -> None:
        self._settings, self._info = state.settings, state.engine.info
        self._json = b""

    def routes(self) -> list[Route]:
        """Their paths."""
        return [Route("/openapi.json", self.openapi), Route("/docs", self.page)]

    async def openapi(self, request: Request) -> Response:
        """For machines."""
        if not self._json:
            self._json = msgspec.json.encode(make_document(self._settings, self._info))
        return Response(self._json, media_type="application/json")

    async def page(self, request: Request) -> Response:
        """For people."""
        url = str(request.base_url).rstrip("/")
        page = make_page(make_document(self._settings, self._info), url, self._settings.model_name)
        # It needs nothing from anywhere, so a browser may refuse all.
        return HTMLResponse(page, headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"})
