"""A device that runs nothing: what steps would launch, so that it can be compiled and sized before anything is captured."""

from __future__ import annotations

from typing import Any

from graphrt.kernels.array import Array
from graphrt.kernels.cuda.driver import Driver, KernelCall, check_call
from graphrt.kernels.cuda.jit import KernelSpec

ProductShape = tuple[int, int, int, int, int, bool]  # rows, n, k, stride of a row of x and of w, accumulated


class DryRun:
    """Stands in for a driver. Kernels are noted; products too, and with `products` each new shape runs once.

    A library loads kernels and takes memory when it first meets a shape: that must not happen inside a capture.
    """

    def __init__(self, driver: Driver, *, products: bool = False) -> None:
        self._driver, self._run_products = driver, products
        self.specs: set[KernelSpec] = set()
        self.products: set[ProductShape] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def launch(self, call: KernelCall) -> None:
        check_call(self._driver, call)
        self.specs.add(call.spec)

    def matmul(self, x: Array, w: Array, out: Array, accumulate: bool) -> None:
        shape = (*x.shape, w.shape[0], x.strides[0], w.strides[0], accumulate)
        if self._run_products and shape not in self.products:
            self._driver.matmul(x, w, out, accumulate)
        self.products.add(shape)  # type: ignore[arg-type]
