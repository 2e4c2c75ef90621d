"""All checks in order, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphrt.doctor import accelerator, machine, models, network
from graphrt.doctor.check import Check, State
from graphrt.paths import models_dir

_COLOURS: dict[State, str] = {"ok": "green", "missing": "bold red", "optional": "yellow"}


def examine() -> list[Check]:
    """Run every check. One that fails unexpectedly becomes a line of the report instead of ending it."""
    found = models.checks()
    return [
        *_guard("CPU", lambda: [machine.cpu()]),
        *_guard("memory", lambda: [machine.memory()]),
        *_guard("disk", lambda: [machine.disk(models_dir(), any(check.state == "ok" for check in found))]),
        *_guard("Python", lambda: [machine.python()]),
        *_guard("numba", lambda: [machine.numba()]),
        *found,
        *_guard("GPU", accelerator.checks),
        *_guard("RDMA", lambda: [network.rdma_devices(), network.pyverbs()]),
        *_guard("Redis", lambda: [network.redis()]),
    ]


def can_serve(checks: Sequence[Check]) -> bool:
    """True if a model can be served on the CPU."""
    return all(check.state != "missing" for check in checks)


def verdict(checks: Sequence[Check]) -> str:
    """The last line: whether the main job runs, and what stops it."""
    if can_serve(checks):
        return "This machine can serve a model on the CPU."
    lacking = ", ".join(check.name for check in checks if check.state == "missing")
    return f"This machine cannot serve a model yet: see {lacking}."


def plain(checks: Sequence[Check]) -> str:
    """One line a check, columns aligned, for pipes and logs."""
    width = max(len(check.name) for check in checks)
    lines = [
        f"{check.state:<8}  {check.name:<{width}}  {check.detail}" + (f"  -> {check.fix}" if check.fix else "")
        for check in checks
    ]
    return "\n".join([*lines, verdict(checks)])


def show_table(checks: Sequence[Check]) -> None:
    """The same as a table on a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        found = Text(check.detail)
        if check.fix:
            found.append(f"\n-> {check.fix}", "cyan")
        table.add_row(Text(check.state, _COLOURS[check.state]), check.name, found)
    console = Console(highlight=False)
    console.print(table)
    console.print(verdict(checks))


def _guard(name: str, run: Callable[[], list[Check]]) -> list[Check]:
    try:
        return run()
    except Exception as error:
        return [Check(name, "optional", f"could not be examined: {type(error).__name__}: {error}")]
