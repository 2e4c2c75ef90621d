"""One step of the running softmax: 64 scores of one query, against the maximum and the sum so far.

Exponentials dominate, so they are vectors of 16. Every reduction has one fixed order.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from graphrt.kernels.cpu import vector_ir as v
from graphrt.kernels.cpu.jit import intrinsic

TOKENS = 64  # scores of a tile
STATE_BYTES = 128  # of a query: its maximum, then (at byte 64) 16 partial sums


@intrinsic
def softmax_tile(typing_context: Any, scores: Any, count: Any, state: Any) -> Any:
    """softmax_tile(scores, count, state) -> factor

    Replaces scores[0:64] by p = exp(score - m), where m is the larger of the state's maximum and the first `count` scores;
    those from `count` on are not looked at and become 0. The state takes on m and the new sums. What was summed up to now under
    the old maximum must be multiplied by `factor`.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        scores, count, state = args
        limit = v.splat(b, b.trunc(count, v.I32))
        lanes = [ir.Constant(v.VI, list(range(16 * i, 16 * i + 16))) for i in range(TOKENS // 16)]
        valid = [b.icmp_signed("<", lane, limit) for lane in lanes]
        lowest = v.const(float("-inf"))
        s = [b.select(valid[i], v.load(b, v.offset(b, scores, 64 * i), v.VF), lowest) for i in range(4)]
        old = v.load(b, state, v.F32)
        pair = v.larger(b, v.larger(b, s[0], s[1]), v.larger(b, s[2], s[3]))
        new = v.larger(b, v.fold(b, pair, lambda one, two: v.larger(b, one, two)), old)
        top = v.splat(b, new)
        factor = v.exp_nonpositive(b, b.fsub(v.splat(b, old), top))
        p = [b.select(valid[i], v.exp_nonpositive(b, b.fsub(s[i], top)), v.const(0.0)) for i in range(4)]
        for i in range(4):
            v.store(b, p[i], v.offset(b, scores, 64 * i))
        sums = v.offset(b, state, 64)
        total = b.fadd(b.fadd(p[0], p[1]), b.fadd(p[2], p[3]))
        v.store(b, v.fma(b, v.load(b, sums, v.VF), factor, total), sums)
        v.store(b, new, state)
        return b.extract_element(factor, v.I32(0))

    return types.float32(types.int64, types.int64, types.int64), codegen


@intrinsic
def scale_floats(typing_context: Any, address: Any, eights: Any, factor: Any) -> Any:
    """scale_floats(address, eights, factor): multiply 8 * eights floats in place"""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        address, eights, factor = args
        kind = ir.VectorType(v.F32, 8)
        factors = v.splat(b, factor, 8)
        with cgutils.for_range(b, eights) as loop:
            here = b.add(address, b.mul(loop.index, v.I64(32)))
            v.store(b, b.fmul(v.load(b, here, kind), factors), here)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


@intrinsic
def softmax_sum(typing_context: Any, state: Any) -> Any:
    """softmax_sum(state) -> the sum of exponentials under the state's maximum"""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return v.fold(b, v.load(b, v.offset(b, args[0], 64), v.VF), b.fadd)

    return types.float32(types.int64), codegen


@intrinsic
def exp_f32(typing_context: Any, x: Any) -> Any:
    """exp_f32(x) -> exp(x) for x <= 0, the same function that the tiles use"""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.extract_element(v.exp_nonpositive(b, v.splat(b, args[0])), v.I32(0))

    return types.float32(types.float32), codegen
