"""How an engine's failure becomes one record and one exit code."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from graphrt.errors import GraphrtError
from graphrt.seam.endpoint import EngineEndpoint
from graphrt.seam.records import Fatal


def run_guarded(run: Callable[[EngineEndpoint], None], endpoint: EngineEndpoint) -> int:
    """Run an engine to its end and return its exit code: 0, or 1 after an exception.

    The server gets the exception as `Fatal` in one line. A `GraphrtError` is meant for the user and is all there is to
    say; any other exception leaves its traceback on stderr too. `SystemExit` passes through.
    """
    try:
        run(endpoint)
        return 0
    except GraphrtError as error:
        message = str(error)
    except Exception as error:
        traceback.print_exc()
        first_line = (str(error).splitlines() or [""])[0]
        message = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    endpoint.send(Fatal(message))
    return 1
