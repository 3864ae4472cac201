"""Weights of 4, 8 or 32 bits times float32 activations, k by k: sum = fma(weight, x, sum).

A quantised weight is d*q and then + m, each rounded: the float32 that the source of the model means. So all three kinds
give the bits of the product with the matrix of float32 weights.

The code of a group is a loop over eight k: straight code was no faster here and took longer to compile.

Unpacked weights: [k in group][16 outputs] float32, as the 32-bit kind has them in memory.
"""

from collections.abc import Callable, Iterator, Sequence

from shared.model.kernels.cpu.packing import F32_GROUP_BYTES, PAIR_ORDER, Q4_GROUP_BYTES, Q8_GROUP_BYTES
from shared.model.kernels.cpu.products import BLOCKS, EIGHTS, Row, Total
from shared.model.kernels.cpu.vectors import Emitter, Value, constant, f32, f32x8, i8x16, i16x16, i32x8


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
        multipliers, minima = self._scales(emit, group)
        with emit.loop(EIGHTS) as eight:
            to = emit.at(unpacked, emit.times(eight, 8 * 64))
            for k, weights in enumerate(self._weights(emit, group, eight, multipliers, minima)):
                for block, weight in enumerate(weights):
                    emit.store(weight, to, 64 * k + 32 * block)

    def add_unpacked(
        self, emit: Emitter, group: Sequence[Value], unpacked: Value, rows: Sequence[Row], totals: Sequence[Total]
    ) -> list[Value]:
        del group
        return self._add(emit, lambda eight: _plain(emit, emit.at(unpacked, emit.times(eight, 8 * 64))), rows, totals)

    def add_packed(
        self, emit: Emitter, group: Sequence[Value], rows: Sequence[Row], totals: Sequence[Total]
    ) -> list[Value]:
        multipliers, minima = self._scales(emit, group)
        return self._add(emit, lambda eight: self._weights(emit, group, eight, multipliers, minima), rows, totals)

    def _add(
        self,
        emit: Emitter,
        columns: Callable[[Value], Iterator[list[Value]]],
        rows: Sequence[Row],
        totals: Sequence[Total],
    ) -> list[Value]:
        variables = [emit.variable(f32x8, total()) for total in totals]
        with emit.loop(EIGHTS) as eight:
            xs = [emit.at(row.x, emit.times(eight, 8 * 4)) for row in rows]
            running = [emit.get(variable) for variable in variables]
            for k, weights in enumerate(columns(eight)):
                for index, address in enumerate(xs):
                    x = emit.load_broadcast(f32, address, 4 * k)
                    for block, weight in enumerate(weights):
                        place = index * BLOCKS + block
                        running[place] = emit.fma(weight, x, running[place])
            for variable, total in zip(variables, running, strict=True):
                emit.set(variable, total)
        return [emit.get(variable) for variable in variables]

    def _scales(self, emit: Emitter, group: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """d and m of the blocks, where the kind has them."""
        multipliers = [emit.load_halves(block) for block in group] if self._weight_bits < 32 else []
        minima = [emit.load_halves(block, 16) for block in group] if self._weight_bits == 4 else []
        return multipliers, minima

    def _weights(
        self, emit: Emitter, group: Sequence[Value], eight: Value, multipliers: list[Value], minima: list[Value]
    ) -> Iterator[list[Value]]:
        """For each of eight k in order the weights of the blocks; emitted when asked for."""
        match self._weight_bits:
            case 4:
                return _four_bits(emit, [emit.at(block, emit.times(eight, 32)) for block in group], multipliers, minima)
            case 8:
                return _eight_bits(emit, [emit.at(block, emit.times(eight, 64)) for block in group], multipliers)
            case _:
                return _plain(emit, emit.at(group[0], emit.times(eight, 8 * 64)))


def _plain(emit: Emitter, address: Value) -> Iterator[list[Value]]:
    for k in range(8):
        yield [emit.load(f32x8, address, 64 * k + 32 * block) for block in range(BLOCKS)]


def _four_bits(
    emit: Emitter, blocks: Sequence[Value], multipliers: list[Value], minima: list[Value]
) -> Iterator[list[Value]]:
    builder = emit.builder
    words = [emit.load(i32x8, block, 32) for block in blocks]
    for k in range(8):
        weights: list[Value] = []
        for word, multiplier, minimum in zip(words, multipliers, minima, strict=True):
            code = builder.lshr(word, constant(i32x8, 8 * (k % 4) + 4 * (k // 4)))
            code = builder.sitofp(builder.and_(code, constant(i32x8, 15)), f32x8)
            weights.append(builder.fadd(builder.fmul(code, multiplier), minimum))
        yield weights


def _eight_bits(emit: Emitter, blocks: Sequence[Value], multipliers: list[Value]) -> Iterator[list[Value]]:
    builder = emit.builder
    for k in range(8):
        pair, half = divmod(PAIR_ORDER.index(k), 2)
        weights: list[Value] = []
        for block, multiplier in zip(blocks, multipliers, strict=True):
            both = builder.bitcast(builder.sext(emit.load(i8x16, block, 16 + 16 * pair), i16x16), i32x8)
            moved = builder.shl(both, constant(i32x8, 16)) if half == 0 else both
            code = builder.ashr(moved, constant(i32x8, 16))
            weights.append(builder.fmul(builder.sitofp(code, f32x8), multiplier))
        yield weights
