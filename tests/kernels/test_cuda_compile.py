"""Every kernel, compiled without a GPU: for each architecture, without spills, and with its wait for the predecessor on every path.

The last is read from the machine code: a flow analysis over nvdisasm's listing finds a path to an exit, or to a store, that does not pass the
wait (ACQBULK). Under programmatic dependent launch such a path is a race that shows once in a thousand runs.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("cuda.core", reason="the compiler's packages are not installed: pip install 'graphrt[jit]'")

from graphrt.errors import DeviceError
from graphrt.kernels.cuda.catalog import all_specs
from graphrt.kernels.cuda.driver import KernelCall
from graphrt.kernels.cuda.jit import ARCHES, Jit, KernelSpec

CORES = 2
LABEL = re.compile(r"^(\.L_\w+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P[T\d]+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
TARGET = re.compile(r"`\((\.L_\w+)\)")


def jit(arch: str) -> Jit:
    try:
        return Jit(arch)
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def disassemble() -> Callable[[bytes, Path], str]:
    from cuda.pathfinder import find_nvidia_binary_utility

    tool = find_nvidia_binary_utility("nvdisasm")
    if tool is None:
        pytest.skip("nvdisasm is not installed: pip install 'graphrt[jit]'")

    def run(code: bytes, folder: Path) -> str:
        path = folder / "kernel.cubin"
        path.write_bytes(code)
        return subprocess.run([tool, path], check=True, capture_output=True, text=True).stdout

    return run


def first_of_each(specs: list[KernelSpec]) -> list[KernelSpec]:
    """One spec for every entry."""
    return list({(s.source, s.entry): s for s in reversed(specs)}.values())


def unguarded(listing: str) -> list[str]:
    """Exits and stores to global memory that are reached without a wait."""
    code: list[tuple[str, str, str]] = []  # predicate, opcode, operands
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := INSTRUCTION.match(line):
            code.append((found[1] or "", found[2], found[3]))
    assert len(code) > 10, "no code in the listing"
    faults, seen, todo = [], set[int](), [0]
    while todo:
        at = todo.pop()
        if at in seen or at >= len(code):
            continue
        seen.add(at)
        predicate, opcode, operands = code[at]
        kind = opcode.split(".")[0]
        assert kind not in ("BRX", "JMX", "RET") or predicate, f"an indirect jump: {opcode} {operands}"
        if kind == "ACQBULK" and not predicate:
            continue
        if kind in ("EXIT", "STG", "RED", "REDG", "ATOMG", "ATOM", "ST") and predicate not in ("@!PT", "@!UPT"):
            faults.append(f"{at}: {predicate} {opcode} {operands}")
        if target := TARGET.search(operands) if kind in ("BRA", "JMP", "CALL", "WARPSYNC") else None:
            todo.append(labels[target[1]])
        if predicate or kind not in ("EXIT", "BRA", "JMP"):
            todo.append(at + 1)
    return faults


@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_compiles_without_spills(arch: str) -> None:
    compiler, specs = jit(arch), all_specs()
    assert len(specs) == len(set(specs)) > 10
    with ThreadPoolExecutor(CORES) as pool:
        reports = list(pool.map(lambda spec: compiler.compile(spec)[1], specs))
    for spec, r in zip(specs, reports, strict=True):
        assert not (r.spill_stores or r.spill_loads or r.stack), f"{spec} on {arch}: {r}"
        assert r.static_smem <= 48 * 1024, f"{spec} on {arch}: {r}"


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_what_a_model_captures_compiles(architecture: str, tiny_model: Callable[..., Path]) -> None:
    """The kernels of a model's own shapes, as the server would ask for them."""
    from graphrt.engine_config import EngineConfig
    from graphrt.graph_report import report

    path = tiny_model(architecture, dtype="bf16", head_dim=32)
    _, graphs = report(EngineConfig(str(path), "cuda", 64, context=128, prefill_chunk=128), 128, fake=True)
    specs = sorted({w.spec for g in graphs.captured.values() for w in getattr(g, "work") if isinstance(w, KernelCall)})  # noqa: B009
    assert len(specs) > 10
    compiler = jit(ARCHES[0])
    with ThreadPoolExecutor(CORES) as pool:
        for spec, (_, r) in zip(specs, pool.map(compiler.compile, specs), strict=True):
            assert not (r.spill_stores or r.spill_loads or r.stack), f"{spec}: {r}"


@pytest.mark.parametrize("arch", ARCHES)
def test_every_path_waits_for_the_predecessor(
    arch: str, disassemble: Callable[[bytes, Path], str], tmp_path: Path
) -> None:
    compiler, specs = jit(arch), all_specs()
    if arch != ARCHES[0]:
        specs = first_of_each(specs)

    def faults(numbered: tuple[int, KernelSpec]) -> list[str]:
        folder = tmp_path / str(numbered[0])
        folder.mkdir()
        found = unguarded(disassemble(compiler.object_code(numbered[1]).code, folder))
        # Tickets are drawn early: from a counter of which no grid beside this one in time knows (CudaOps._counter).
        return [f for f in found if numbered[1].entry != "gemv" or "ATOMG.E.INC" not in f]

    with ThreadPoolExecutor(CORES) as pool:
        found = list(pool.map(faults, enumerate(specs)))
    bad = {str(spec): f for spec, f in zip(specs, found, strict=True) if f}
    assert not bad


def test_a_missing_wait_is_found(disassemble: Callable[[bytes, Path], str], tmp_path: Path) -> None:
    """The analysis sees an early return, a store that is too early, and a wait that only some threads reach."""
    from cuda.core import Program, ProgramOptions

    wait = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
    bodies = {
        "fine": f"{wait} if (n < 0) return; p[threadIdx.x] = n;",
        "fine, in a loop": f"int s = 0; for (int i = 0; i < n; ++i) s += q[i]; {wait} p[threadIdx.x] = s;",
        "early return": f"if (threadIdx.x > n) return; {wait} p[threadIdx.x] = n;",
        "early store": f"p[threadIdx.x] = n; {wait} p[n] = 1;",
        "some threads": f"if (threadIdx.x == 0) {{ {wait} p[1] = n; }} else {{ p[2] = n; }}",
        "none": "p[threadIdx.x] = n;",
    }
    for name, body in bodies.items():
        source = f'extern "C" __global__ void kernel(volatile int* p, const int* q, int n) {{ {body} }}'
        code = Program(source, "c++", ProgramOptions(arch=ARCHES[0])).compile("cubin").code
        assert bool(unguarded(disassemble(code, tmp_path))) != name.startswith("fine"), name
