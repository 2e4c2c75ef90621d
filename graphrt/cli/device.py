"""Which device `--device` means on this machine."""

from __future__ import annotations

from graphrt.doctor.driver import Driver, probe
from graphrt.errors import DeviceError

CHOICES = ("auto", "cpu", "cuda")
MAX_BATCH = {"cpu": 8, "cuda": 64}  # sequences at once, where nobody said how many


def choose(asked: str, driver: Driver | None = None) -> tuple[str, str]:
    """(device, why). DeviceError when what is asked for cannot be had. `driver` None: probe this machine's."""
    if asked == "cpu":
        return "cpu", "as asked"
    from graphrt.gpu import problem

    driver = driver or probe()
    why = problem(driver)
    if not why:
        return "cuda", driver.gpus[0].name
    if asked == "cuda":
        raise DeviceError(f"device cuda: {why}; use --device cpu or auto")
    return "cpu", why
