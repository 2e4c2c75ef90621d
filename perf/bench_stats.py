"""What a load test makes of its requests' times. All times are the client's, in seconds on one clock.

Per request, with tokens counted by the server's usage:
  TTFT = first event with text - start          E2E  = last event - start
  TPOT = (E2E - TTFT) / (output tokens - 1)     ITL  = gaps between successive events with text
Percentiles interpolate linearly (NumPy's default). Throughput divides by the span from the first start to the last end. A request is
good when it ended well and meets every bound given; goodput is good requests a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class RequestRecord:
    """One request. `events`: when each event with text came. `error` is empty for a request that ended well."""

    start: float
    end: float = 0.0
    events: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    status: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.events[0] - self.start

    @property
    def e2e(self) -> float:
        return self.events[-1] - self.start

    @property
    def tpot(self) -> float | None:
        """None for a reply of one token: it has no later ones."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def meets(self, slo: dict[str, float]) -> bool:
        """Whether it ended well within the bounds, in ms, of `ttft`, `tpot`, `e2e`."""
        if self.error or not self.events:
            return False
        values = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return all((value := values[name]) is None or value * 1e3 <= bound for name, bound in slo.items())


def summarise(records: list[RequestRecord], slo: dict[str, float]) -> dict[str, Any]:
    """All figures of a run. Latencies in ms, over the requests that ended well."""
    good = [r for r in records if not r.error and r.events]
    span = max((r.end for r in records), default=0.0) - min((r.start for r in records), default=0.0)
    errors: dict[str, int] = {}
    for r in records:
        if r.error:
            errors[r.error] = errors.get(r.error, 0) + 1
    out: dict[str, Any] = {
        "requests": len(records),
        "completed": len(good),
        "errors": errors,
        "duration_s": round(span, 3),
        "prompt_tokens": sum(r.prompt_tokens for r in good),
        "output_tokens": sum(r.output_tokens for r in good),
        "ttft_ms": spread([r.ttft for r in good]),
        "tpot_ms": spread([t for r in good if (t := r.tpot) is not None]),
        "itl_ms": spread([b - a for r in good for a, b in zip(r.events, r.events[1:], strict=False)]),
        "e2e_ms": spread([r.e2e for r in good]),
    }
    if span > 0:
        out["requests_per_s"] = round(len(good) / span, 3)
        out["output_tokens_per_s"] = round(out["output_tokens"] / span, 3)
        out["total_tokens_per_s"] = round((out["output_tokens"] + out["prompt_tokens"]) / span, 3)
        if slo:
            out["slo_ms"] = slo
            out["goodput_per_s"] = round(sum(r.meets(slo) for r in records) / span, 3)
    return out


def spread(seconds: list[float]) -> dict[str, float]:
    """Mean, deviation, extremes and percentiles in ms; empty for no values."""
    if not seconds:
        return {}
    ms = np.asarray(seconds) * 1e3
    values = {"mean": ms.mean(), "std": ms.std(), "min": ms.min(), "max": ms.max()}
    values |= {f"p{p}": np.percentile(ms, p) for p in PERCENTILES}
    return {name: round(float(v), 3) for name, v in values.items()}
