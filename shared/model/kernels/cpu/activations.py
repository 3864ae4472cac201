"""Activations rounded to integers for the integer products, group by group of 32, from and to any addresses."""

from functools import partial
from typing import Any, Final

from shared.model.kernels.cpu.packing import GROUP, PAIR_ORDER
from shared.model.kernels.cpu.vectors import (
    INT64,
    Emitter,
    Value,
    constant,
    f32,
    f32x8,
    i8x8,
    i16x8,
    i32x8,
    ir,
    micro_kernel,
)

SMALLEST_RANGE: Final = 1e-20
"""Largest magnitude assumed of a group that has a smaller one, so that a group of zeros has a scale."""


def _emit_quantise(bits: int, emit: Emitter, x: Value, q: Value, scale: Value, sums: Value, num_groups: Value) -> None:
    builder = emit.builder
    limit = constant(f32, {16: 32767.0, 8: 127.0}[bits])
    with emit.loop(num_groups) as group:
        x_at = emit.at(x, emit.times(group, GROUP * 4))
        q_at = emit.at(q, emit.times(group, GROUP * bits // 8))
        values = [emit.load(f32x8, x_at, 32 * each) for each in range(4)]
        magnitudes = [emit.absolute(value) for value in values]
        largest = emit.largest_lane(
            emit.larger(emit.larger(magnitudes[0], magnitudes[1]), emit.larger(magnitudes[2], magnitudes[3]))
        )
        largest = emit.larger(largest, constant(f32, SMALLEST_RANGE))
        inverse = emit.broadcast(builder.fdiv(limit, largest))
        total = None
        for each, value in enumerate(values):
            rounded = emit.nearest(builder.fmul(value, inverse))
            total = rounded if total is None else builder.fadd(total, rounded)
            whole = builder.fptosi(emit.number_or_zero(rounded), i32x8)
            if bits == 16:
                emit.store(emit.shuffle(builder.trunc(whole, i16x8), PAIR_ORDER), q_at, 16 * each)
            else:
                emit.store(builder.trunc(whole, i8x8), q_at, 8 * each)
        # Whole numbers below 2^24: exact in any order. Not a number, where x has one or an infinity (times 0).
        sum_of_group = emit.sum_of_lanes(total)
        is_finite = builder.fcmp_ordered("ord", sum_of_group, sum_of_group)
        step = builder.select(is_finite, builder.fdiv(largest, limit), ir.Constant(f32, float("nan")))
        emit.store(step, emit.at(scale, emit.times(group, 4)))
        emit.store(builder.fmul(step, sum_of_group), emit.at(sums, emit.times(group, 4)))


_PARAMETERS: Final = (INT64,) * 5

quantise_int16: Final[Any] = micro_kernel("quantise_int16", _PARAMETERS, partial(_emit_quantise, 16))
"""quantise_int16((x, q, scale, sums, num_groups)), addresses: 32 float32 of a group to int16 in the order PAIR_ORDER.

largest = max(max |x|, 1e-20); q = round(x * (32767 / largest)); scale = largest / 32767; sums = scale * sum of q; all
in float32. A group with a number that is not finite gets "not a number" as its scale: every product with it shows that.
"""
quantise_int8: Final[Any] = micro_kernel("quantise_int8", _PARAMETERS, partial(_emit_quantise, 8))
"""The same with int8 in plain order and 127."""
