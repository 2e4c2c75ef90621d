"""GET /debug/steps: what the engine's last steps were like."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graphrt.api.errors import ApiError
from graphrt.api.ports import StepLog
from graphrt.api.reply_schema import StepEntry, StepList
from graphrt.api.state import AppState

DEFAULT_STEPS = 100
MAX_STEPS = 1000


class DebugRoutes:
    """Pages for those who look into a running server."""

    def __init__(self, state: AppState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        """Their paths."""
        return [Route("/debug/steps", self.steps)]

    async def steps(self, request: Request) -> Response:
        """The last `n` steps."""
        state = self._state
        n = _count(request.query_params.get("n", str(DEFAULT_STEPS)))
        if not isinstance(state.engine, StepLog):
            raise ApiError("this engine keeps no log of its steps", status=404)
        if not state.engine.alive:
            state.check_serving()
        log = await state.engine.step_log(n)
        entries = [StepEntry(s.step, s.kind, s.batch, s.rows, s.ms, s.host_us) for s in log]
        return Response(msgspec.json.encode(StepList(entries)), media_type="application/json")


def _count(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else 0
    if not 1 <= number <= MAX_STEPS:
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise ApiError(f"n is {shown!r}: must be from 1 to {MAX_STEPS}", param="n")
    return number
