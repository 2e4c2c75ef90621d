"""All that the endpoints share, passed to them by hand: there are no globals."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field

from graphrt import __version__
from graphrt.api.auth_ring import KeyRing
from graphrt.api.body_budget import BodyBudget
from graphrt.api.defaults import SamplingDefaults
from graphrt.api.encoders import Encoders
from graphrt.api.errors import ApiError
from graphrt.api.generation import Generation
from graphrt.api.metrics import Metrics
from graphrt.api.ports import Engine, PromptTemplate, TextCodec
from graphrt.api.prompt_room import PromptRoom
from graphrt.api.rate_limits import Limits, RateLimiter
from graphrt.api.settings import ServerSettings


@dataclass(eq=False)
class AppState:
    """One server. `live` holds the generations under way."""

    settings: ServerSettings
    engine: Engine
    tokenizer: TextCodec
    template: PromptTemplate
    defaults: SamplingDefaults
    metrics: Metrics
    keys: KeyRing
    limiter: RateLimiter
    bodies: BodyBudget
    room: PromptRoom
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    live: set[Generation] = field(default_factory=set)
    encoders: Encoders = field(default_factory=Encoders)
    fingerprint: str = ""

    def __post_init__(self) -> None:
        info = self.engine.info
        made_of = "|".join((__version__, self.settings.model_name, info.architecture, info.device))
        self.metrics.live = lambda: len(self.live)
        self.fingerprint = "fp_" + hashlib.sha256(made_of.encode()).hexdigest()[:10]

    def check_serving(self) -> None:
        """Raise `ApiError` 503 when no request can be taken."""
        if not self.engine.alive:
            reason = self.engine.death_reason or "no reason known"
            raise ApiError(f"the engine is dead: {reason}", status=503, code="engine_dead")
        if self.draining:
            raise ApiError("the server is shutting down", status=503, code="shutting_down")

    def check_model(self, name: str) -> None:
        """Raise `ApiError` 404 unless `name` is the served model."""
        if name != self.settings.model_name:
            raise ApiError(
                f"the model {name!r} does not exist: this server serves {self.settings.model_name!r}",
                param="model",
                status=404,
                code="model_not_found",
            )

    def abort_live(self, error: ApiError) -> int:
        """End all generations with `error`; how many there were."""
        live = list(self.live)
        for generation in live:
            generation.abort(error)
        return len(live)

    def close(self) -> None:
        """Let go of the threads; a prompt still being encoded is not waited for."""
        self.encoders.close()


def make_state(
    settings: ServerSettings,
    engine: Engine,
    tokenizer: TextCodec,
    template: PromptTemplate,
    defaults: SamplingDefaults | None = None,
    keys: KeyRing | None = None,
) -> AppState:
    """A state with fresh metrics and limits around the given parts. `keys` are read from the settings' files if absent."""
    metrics = Metrics(settings.model_name, lambda: engine.stats, lambda: engine.alive, engine.info.max_batch)
    limits = Limits(settings.max_concurrency, settings.key_concurrency, settings.key_rpm)
    return AppState(
        settings,
        engine,
        tokenizer,
        template,
        defaults or SamplingDefaults(),
        metrics,
        keys or KeyRing(settings.api_key_files),
        RateLimiter(limits, settings.retry_after_s),
        BodyBudget(settings.bodies_limit, settings.retry_after_s),
        PromptRoom(engine.info.context, tokenizer.longest_token),
    )
