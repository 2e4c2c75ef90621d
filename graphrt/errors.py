"""Errors that a user can act on. Each carries one clear message: the thing, the value, the limit."""


class GraphrtError(Exception):
    """Base of all errors whose message is meant for the user; the command line prints it without a traceback."""


class ModelError(GraphrtError):
    """A model directory, file or configuration that cannot be served."""


class ConfigError(GraphrtError):
    """A flag or setting out of its range."""


class DeviceError(GraphrtError):
    """The asked-for device is absent, too old or too small."""


class RequestError(GraphrtError):
    """A request that the engine cannot take. `param` names the offending field, `status` the HTTP status."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class EngineDead(GraphrtError):
    """The engine process ended while requests were waiting for it."""
