"""Weights of 4 or 8 bits times activations of 16 or 8: exact integers in a group, float32 from group to group.

A group adds to an output's sum

    sum = fma(m, sums, sum)                       4-bit weights only; `sums` is the scaled sum of the row's numbers
    sum = fma(d * scale, float(integers), sum)    `integers` is the exact sum of products over the group

At most 32 x 15 x 32767 in 4-bit groups is exact even as float32; 32 x 127 x 32767 fits int32 and is rounded once.

Unpacked weights: [step][2 blocks] vectors of 32 bytes, a step for each 32 bits of a row's activations.
"""

from collections.abc import Iterator, Sequence

from shared.model.kernels.cpu.packing import GROUP, Q4_GROUP_BYTES, Q8_GROUP_BYTES
from shared.model.kernels.cpu.products import BLOCKS, Row, Total
from shared.model.kernels.cpu.vectors import Emitter, Value, constant, f32, f32x8, i8x16, i8x32, i16x16, i32


class IntegerKind:
    """4 x 16, 4 x 8 or 8 x 16 bits."""

    def __init__(self, *, weight_bits: int, activation_bits: int) -> None:
        self._weight_bits = weight_bits
        self._activation_bits = activation_bits
        self.group_bytes = Q4_GROUP_BYTES if weight_bits == 4 else Q8_GROUP_BYTES
        self.is_joined = False
        self.x_bytes = activation_bits // 8
        self._num_steps = GROUP * self.x_bytes // 4
        self._vector = i16x16 if activation_bits == 16 else i8x32
        self.scratch_bytes = self._num_steps * BLOCKS * 32
        # Four rows and two blocks are eight sums, two vectors of weights and one of activations: 11 of 16 registers.
        self.turns: Sequence[int] = (4, 2, 1)

    def unpack(self, emit: Emitter, group: Sequence[Value], unpacked: Value) -> None:
        for block, address in enumerate(group):
            for step, vector in enumerate(self._weights(emit, address)):
                emit.store(vector, unpacked, (step * BLOCKS + block) * 32)

    def add_unpacked(
        self, emit: Emitter, group: Sequence[Value], unpacked: Value, rows: Sequence[Row], totals: Sequence[Total]
    ) -> list[Value]:
        steps = (
            [emit.load(self._vector, unpacked, (step * BLOCKS + block) * 32) for block in range(BLOCKS)]
            for step in range(self._num_steps)
        )
        return self._add(emit, group, steps, rows, totals)

    def add_packed(
        self, emit: Emitter, group: Sequence[Value], rows: Sequence[Row], totals: Sequence[Total]
    ) -> list[Value]:
        steps = (list(vectors) for vectors in zip(*(self._weights(emit, block) for block in group), strict=True))
        return self._add(emit, group, steps, rows, totals)

    def _weights(self, emit: Emitter, block: Value) -> Iterator[Value]:
        """The vectors of a block, step by step; each is emitted when it is asked for."""
        builder = emit.builder
        if self._weight_bits == 8:
            for step in range(self._num_steps):
                yield builder.sext(emit.load(i8x16, block, 16 + 16 * step), i16x16)
        elif self._activation_bits == 16:
            for vector in range(4):
                nibbles = emit.load(i16x16, block, 32 + 32 * vector)
                yield builder.and_(nibbles, constant(i16x16, 15))
                yield builder.and_(builder.lshr(nibbles, constant(i16x16, 4)), constant(i16x16, 15))
                yield builder.and_(builder.lshr(nibbles, constant(i16x16, 8)), constant(i16x16, 15))
                yield builder.lshr(nibbles, constant(i16x16, 12))
        else:
            for vector in range(4):
                nibbles = emit.load(i16x16, block, 32 + 32 * vector)
                for shift in (0, 4):
                    shifted = builder.bitcast(builder.lshr(nibbles, constant(i16x16, shift)), i8x32)
                    yield builder.and_(shifted, constant(i8x32, 15))

    def _add(
        self,
        emit: Emitter,
        blocks: Sequence[Value],
        steps: Iterator[list[Value]],
        rows: Sequence[Row],
        totals: Sequence[Total],
    ) -> list[Value]:
        builder = emit.builder
        is_wide = self._activation_bits == 16
        integers: list[Value | None] = [None] * len(totals)
        for step, weights in enumerate(steps):
            for index, row in enumerate(rows):
                x = builder.bitcast(emit.load_broadcast(i32, row.x, 4 * step), self._vector)
                for block, weight in enumerate(weights):
                    product = emit.pair_products(weight, x) if is_wide else emit.byte_pair_products(weight, x)
                    place = index * len(blocks) + block
                    before = integers[place]
                    integers[place] = product if before is None else builder.add(before, product)
            integers = [*emit.pin(integers)]
        multipliers = [emit.load_halves(block) for block in blocks]
        minima = [emit.load_halves(block, 16) for block in blocks] if self._weight_bits == 4 else []
        result: list[Value] = []
        for index, row in enumerate(rows):
            scale = emit.load_broadcast(f32, row.scale)
            for block in range(len(blocks)):
                place = index * len(blocks) + block
                # Eight sums of bytes fit 16 bits, 8 x 2 x 15 x 127 = 30480; the last neighbours are added in 32.
                whole = integers[place] if is_wide else emit.pair_products(integers[place], constant(i16x16, 1))
                total = totals[place]()
                if minima:
                    total = emit.fma(minima[block], emit.load_broadcast(f32, row.sums), total)
                factor = builder.fmul(multipliers[block], scale)
                result.append(emit.fma(factor, builder.sitofp(whole, f32x8), total))
        return result
