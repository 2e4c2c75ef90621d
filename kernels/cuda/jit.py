"""From a `KernelSpec` to a loaded kernel: NVRTC for the architecture at hand, with cuda.core's disk cache.

The one clever thing: a spec is a frozen tuple that is at once what the source is specialised by (every option becomes a macro), the key
of the cache and the record that tuning keeps. Sources include no system header, so the compiler is all that is needed, and a kernel
compiles in a tenth of a second. Nothing here touches a device but `device_arch` and `Jit.kernel`.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrt.errors import DeviceError

if TYPE_CHECKING:
    from cuda.core import Kernel, ObjectCode

SOURCES = Path(__file__).parent
ARCHES = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")  # what CI compiles for; a device's own is asked from the device
MIN_CAPABILITY = (9, 0)  # programmatic dependent launch and bulk copies
PIP = "pip install 'graphrt[cuda]'"

Progress = Callable[[int, int, "KernelSpec"], None]  # done, total, the one just done


@dataclass(frozen=True, slots=True, order=True)
class KernelSpec:
    """One kernel, fully specialised.

    source: file in this folder. entry: its `extern "C"` name. options: (name, value) pairs, each the macro NAME of the source.
    """

    source: str
    entry: str
    options: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, source: str, entry: str, **options: int) -> KernelSpec:
        """Options are sorted by name, so that equal specs are equal tuples."""
        return cls(source, entry, tuple(sorted((k, int(v)) for k, v in options.items())))

    def __getitem__(self, name: str) -> int:
        """An option's value; KeyError when the spec has no such option."""
        return dict(self.options)[name]

    def get(self, name: str, default: int) -> int:
        return dict(self.options).get(name, default)

    def with_options(self, **options: int) -> KernelSpec:
        """The same kernel with some options changed or added."""
        return replace(self, options=self.of(self.source, self.entry, **{**dict(self.options), **options}).options)

    def __str__(self) -> str:
        return f"{self.entry}({', '.join(f'{k}={v}' for k, v in self.options)})"


@dataclass(frozen=True, slots=True)
class Report:
    """What ptxas says of one kernel. Registers a thread; stack, spill and static shared bytes."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_smem: int


class Jit:
    """Compiles specs for one architecture. Threads and processes may share a cache directory; entries are written atomically.

    cache_dir: where cubins are kept, or None to compile every time.
    """

    def __init__(self, arch: str, cache_dir: Path | None = None) -> None:
        """DeviceError when the compiler's packages are missing."""
        check_packages()
        self.arch = arch
        self._headers = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(SOURCES.glob("*.cuh")))).digest()
        self._cache: Any = None
        if cache_dir is not None:
            from cuda.core.utils import FileStreamProgramCache

            cache_dir.mkdir(parents=True, exist_ok=True)
            self._cache = FileStreamProgramCache(cache_dir)
        self._kernels: dict[KernelSpec, Kernel] = {}

    def object_code(self, spec: KernelSpec) -> ObjectCode:
        """The cubin, from the cache where it has it. DeviceError with the compiler's log when the source does not compile."""
        from cuda.core import ObjectCode
        from cuda.core.utils import make_program_cache_key

        if self._cache is None:
            return self._build(spec)[0]
        code = _read(spec)
        key = make_program_cache_key(
            code=code, code_type="c++", options=self._options(spec), target_type="cubin", extra_digest=self._headers
        )
        data = self._cache.get(key)
        if data is not None:
            return ObjectCode.from_cubin(data, name=spec.entry)
        obj, _ = self._build(spec)
        self._cache[key] = obj
        return obj

    def compile(self, spec: KernelSpec) -> tuple[ObjectCode, Report]:
        """Compile anew, past the cache, and say what the kernel takes."""
        obj, log = self._build(spec)
        return obj, parse_report(log, spec)

    def _build(self, spec: KernelSpec) -> tuple[ObjectCode, str]:
        """The cubin and the compiler's log, which is empty where the driver kept the result of an earlier run."""
        from cuda.core import Program

        log = io.StringIO()
        try:
            obj = Program(_read(spec), "c++", self._options(spec)).compile("cubin", logs=log)
        except Exception as error:
            raise DeviceError(f"kernel {spec} does not compile for {self.arch}: {error}\n{log.getvalue()}") from error
        return obj, log.getvalue()

    def kernel(self, spec: KernelSpec) -> Kernel:
        """The kernel, loaded in the current context; the same object every time. Needs a device.

        DeviceError, with the kernel's name, when it does not compile, its source has no such entry, or the driver does not load it.
        """
        if spec not in self._kernels:
            self._kernels[spec] = _load(spec, self.object_code(spec))
        return self._kernels[spec]

    def prepare(self, specs: Iterable[KernelSpec], threads: int, progress: Progress | None = None) -> None:
        """Compile many at once into the cache, then load them. The first error, as of `kernel`, is raised once the rest has ended."""
        todo = sorted(set(specs) - self._kernels.keys())
        with ThreadPoolExecutor(threads) as pool:
            jobs = {pool.submit(self.object_code, spec): spec for spec in todo}
            for done, job in enumerate(as_completed(jobs), 1):
                spec = jobs[job]
                self._kernels[spec] = _load(spec, job.result())
                if progress is not None:
                    progress(done, len(todo), spec)

    def _options(self, spec: KernelSpec) -> Any:
        from cuda.core import ProgramOptions

        return ProgramOptions(
            name=spec.source,
            arch=self.arch,
            std="c++20",
            device_as_default_execution_space=True,
            define_macro=[(name.upper(), str(value)) for name, value in spec.options] or None,
            include_path=[str(SOURCES)],
            ptxas_options=["-v"],
        )


def device_arch(device: Any) -> str:
    """The architecture to compile for: the device's own, with its own instructions ("a"). DeviceError for a card too old."""
    major, minor = device.compute_capability
    if (major, minor) < MIN_CAPABILITY:
        least = ".".join(map(str, MIN_CAPABILITY))
        raise DeviceError(
            f"{device.name} has compute capability {major}.{minor}: graphrt needs {least} (Hopper) or newer"
        )
    return f"sm_{major}{minor}a"


def parse_report(log: str, spec: KernelSpec) -> Report:
    """Read ptxas' -v lines of one entry. DeviceError when they are not there."""
    used = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if used is None or frame is None:
        raise DeviceError(f"kernel {spec}: the compiler reported no registers:\n{log}")
    smem = re.search(r"(\d+) bytes smem", log)
    stack, stores, loads = map(int, frame.groups())
    return Report(int(used[1]), stores, loads, stack, int(smem[1]) if smem else 0)


def _load(spec: KernelSpec, code: ObjectCode) -> Kernel:
    try:
        return code.get_kernel(spec.entry)
    except Exception as error:  # cuda.core's own, or the driver's
        raise DeviceError(f"kernel {spec} cannot be loaded from {spec.source}: {error}") from error


def _read(spec: KernelSpec) -> str:
    return (SOURCES / spec.source).read_text()


def check_packages() -> None:
    """DeviceError when cuda.core or NVRTC is missing: found here before the first kernel needs them, so that the message is ours."""
    try:
        importlib.import_module("cuda.core")
        importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except Exception as error:  # ImportError, or whatever the loader raises where the library is missing
        raise DeviceError(f"CUDA kernels need cuda.core and NVRTC ({error}): {PIP}") from error
