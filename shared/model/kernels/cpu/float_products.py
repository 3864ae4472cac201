"""Weights of 4, 8 or 32 bits times float32 activations, k by k: sum = fma(weight, x, sum).

A quantised weight is d*q and then + m, each rounded: the float32 that the source of the model means. So all three kinds
give the bits of the product with the matrix of float32 weights.

Unpacked weights: [k in group][16 outputs] float32, as the 32-bit kind has them in memory.
"""

from collections.abc import Iterator, Sequence

from shared.model.kernels.cpu.packing import F32_GROUP_BYTES, GROUP, PAIR_ORDER, Q4_GROUP_BYTES, Q8_GROUP_BYTES
from shared.model.kernels.cpu.products import BLOCKS, Row, Total
from shared.model.kernels.cpu.vectors import Emitter, Value, constant, f32, f32x8, i8x16, i16x16, i32x8

_UNROLLED = 4
"""k of one turn of the inner loop: straight code for 32 would be larger than the cache of decoded instructions."""


class FloatKind:
    """4, 8 or 32 bits x float32."""

    def __init__(self, *, weight_bits: int) -> None:
        self._weight_bits = weight_bits
        self.group_bytes = {4: Q4_GROUP_BYTES, 8: Q8_GROUP_BYTES, 32: F32_GROUP_BYTES}[weight_bits]
        self.is_joined = weight_bits == 32
        self.x_bytes = 4
        self.scratch_bytes = 0 if weight_bits == 32 else F32_GROUP_BYTES
        # Four rows are eight sums, what the latency of fma asks for at two a cycle; six were slower at most row counts.
        self.turns: Sequence[int] = (4, 3, 2, 1)

    def unpack(self, emit: Emitter, group: Sequence[Value], unpacked: Value) -> None:
        for k, weights in enumerate(self._weights(emit, group)):
            for block, weight in enumerate(weights):
                emit.store(weight, unpacked, 64 * k + 32 * block)

    def add_unpacked(
        self, emit: Emitter, group: Sequence[Value], unpacked: Value, rows: Sequence[Row], totals: Sequence[Total]
    ) -> list[Value]:
        del group
        variables = [emit.variable(f32x8, total()) for total in totals]
        with emit.loop(GROUP // _UNROLLED) as turn:
            weights_at = emit.at(unpacked, emit.times(turn, _UNROLLED * 64))
            xs_at = [emit.at(row.x, emit.times(turn, _UNROLLED * 4)) for row in rows]
            running = [emit.get(variable) for variable in variables]
            for k in range(_UNROLLED):
                weights = [emit.load(f32x8, weights_at, 64 * k + 32 * block) for block in range(BLOCKS)]
                running = _add(emit, weights, [emit.load_broadcast(f32, x, 4 * k) for x in xs_at], running)
            for variable, total in zip(variables, running, strict=True):
                emit.set(variable, total)
        return [emit.get(variable) for variable in variables]

    def add_packed(
        self, emit: Emitter, group: Sequence[Value], rows: Sequence[Row], totals: Sequence[Total]
    ) -> list[Value]:
        running = [total() for total in totals]
        for k, weights in enumerate(self._weights(emit, group)):
            running = _add(emit, weights, [emit.load_broadcast(f32, row.x, 4 * k) for row in rows], running)
        return running

    def _weights(self, emit: Emitter, group: Sequence[Value]) -> Iterator[list[Value]]:
        """For each k in order the weights of the blocks; emitted when asked for."""
        match self._weight_bits:
            case 4:
                return _four_bits(emit, group)
            case 8:
                return _eight_bits(emit, group)
            case _:
                return (
                    [emit.load(f32x8, group[0], 64 * k + 32 * block) for block in range(BLOCKS)] for k in range(GROUP)
                )


def _four_bits(emit: Emitter, group: Sequence[Value]) -> Iterator[list[Value]]:
    builder = emit.builder
    multipliers = [emit.load_halves(block) for block in group]
    minima = [emit.load_halves(block, 16) for block in group]
    for vector in range(4):
        nibbles = [emit.load(i32x8, block, 32 + 32 * vector) for block in group]
        for k in range(8):
            weights: list[Value] = []
            for word, multiplier, minimum in zip(nibbles, multipliers, minima, strict=True):
                code = builder.lshr(word, constant(i32x8, 8 * (k % 4) + 4 * (k // 4)))
                code = builder.sitofp(builder.and_(code, constant(i32x8, 15)), f32x8)
                weights.append(builder.fadd(builder.fmul(code, multiplier), minimum))
            yield weights


def _eight_bits(emit: Emitter, group: Sequence[Value]) -> Iterator[list[Value]]:
    builder = emit.builder
    multipliers = [emit.load_halves(block) for block in group]
    for k in range(GROUP):
        pair, half = divmod(PAIR_ORDER.index(k % 8), 2)
        weights: list[Value] = []
        for block, multiplier in zip(group, multipliers, strict=True):
            codes = emit.load(i8x16, block, 16 + 16 * (4 * (k // 8) + pair))
            both = builder.bitcast(builder.sext(codes, i16x16), i32x8)
            moved = builder.shl(both, constant(i32x8, 16)) if half == 0 else both
            code = builder.ashr(moved, constant(i32x8, 16))
            weights.append(builder.fmul(builder.sitofp(code, f32x8), multiplier))
        yield weights


def _add(emit: Emitter, weights: list[Value], xs: list[Value], totals: list[Value]) -> list[Value]:
    """One k for all rows and blocks."""
    return [
        emit.fma(weight, x, totals[index * BLOCKS + block])
        for index, x in enumerate(xs)
        for block, weight in enumerate(weights)
    ]
