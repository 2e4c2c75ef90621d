"""Which device `--device` means on this machine."""

from __future__ import annotations

from graphrt.doctor.driver import Driver, probe
from graphrt.errors import DeviceError

CHOICES = ("auto", "cpu", "cuda")


def choose(asked: str, driver: Driver | None = None) -> tuple[str, str]:
    """(device, why). DeviceError when what is asked for cannot be had. `driver` None: probe this machine's."""
    if asked == "cpu":
        return "cpu", "as asked"
    driver = driver or probe()
    seen = f"{driver.gpus[0].name} found, but" if driver.fits else f"{driver.problem};"
    if asked == "cuda":
        raise DeviceError(f"device cuda: {seen} this version has no CUDA backend; use --device cpu or auto")
    return "cpu", f"{seen} this version has no CUDA backend"
