"""Matrix products over a range of outputs with any number of rows: the code that most compute time goes to.

Every output of every row is summed in one fixed order that depends on nothing but k: how, the kinds say
(`integer_products`, `float_products`). Here are the two ways through the same arithmetic, for a unit of 16 outputs:

- up to four rows: weights go from memory through registers into the sums, and while a unit is multiplied all of the
  unit behind it is asked for, line by line as it lies (a quarter faster than a fixed distance within each block, which
  asks for the first half of every second block too late);
- more rows: tiles of rows. For each group the weights are unpacked once, to scratch in the first-level cache, and the
  rows take turns at them, a few together. The tile's sums lie beside them, [row of tile][16] float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from shared.model.kernels.cpu.packing import GROUP, UNIT
from shared.model.kernels.cpu.vectors import INT64, Emitter, Value, constant, f32x8, i64

TILE_ROWS: Final = 64
"""Rows of a tile: their sums take 4 KiB, a group of their activations 4 to 8: half of a first-level cache of 32."""
FEW_ROWS: Final = 4
"""Rows for which unpacking in registers wins: a fifth at 3 and 4; beyond, their sums fill the registers."""
BLOCKS: Final = 2
"""Vectors of eight outputs in a unit."""
EIGHTS: Final = GROUP // 8
"""Pieces of a group that lie together in all layouts."""
PARAMETERS: Final = (INT64,) * 12
"""Of a product: weights, k, x, scale, sums, elements between rows of x, out, elements between its rows, number of rows,
1 to add to out or 0, first output, end of outputs. Addresses of row 0 and output 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Addresses of one group of one row's activations."""

    x: Value
    scale: Value
    sums: Value


Total = Callable[[], Value]
"""Reads a sum from where it is kept: called once, where the code needs it, so that it holds no register before."""


class Kind(Protocol):
    """How weights and activations of one kind are multiplied."""

    group_bytes: int
    """Of a block of eight outputs; of the whole unit where `is_joined`."""
    is_joined: bool
    """A unit is one piece of memory for each group, not two blocks apart."""
    scratch_bytes: int
    """For the weights of a group, unpacked; 0 where they are used as they lie."""
    x_bytes: int
    """Of one activation."""
    turns: Sequence[int]
    """How many rows are multiplied together in a tile, falling, the last 1."""

    def unpack(self, emit: Emitter, group: Sequence[Value], unpacked: Value) -> None:
        """Write the weights of a group to scratch; `group` is the addresses of its blocks."""
        ...

    def add_unpacked(
        self, emit: Emitter, group: Sequence[Value], unpacked: Value, rows: Sequence[Row], totals: Sequence[Total]
    ) -> list[Value]:
        """The sums `totals` (row by row, in a row block by block) with a group added, by way of unpacked weights."""
        ...

    def add_packed(
        self, emit: Emitter, group: Sequence[Value], rows: Sequence[Row], totals: Sequence[Total]
    ) -> list[Value]:
        """The same without scratch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """The operands of one unit, as values of LLVM; distances in bytes."""

    kind: Kind
    weights: Value
    num_groups: Value
    first: Row
    x_distance: Value
    scale_distance: Value
    out: Value
    out_distance: Value
    accumulate: Value

    def group(self, emit: Emitter, index: Value) -> list[Value]:
        offset = emit.times(index, self.kind.group_bytes)
        if self.kind.is_joined:
            return [emit.at(self.weights, offset)]
        block_bytes = emit.times(self.num_groups, self.kind.group_bytes)
        return [emit.at(self.weights, offset), emit.at(self.weights, offset, block_bytes)]

    def ask_next(self, emit: Emitter, group: Value) -> None:
        """Ask for a group of the unit behind this one, in order as it lies, not block by block."""
        group_bytes = self.kind.group_bytes * (1 if self.kind.is_joined else BLOCKS)
        address = emit.at(self.weights, emit.times(emit.at(self.num_groups, group), group_bytes))
        for line in range(0, group_bytes, 64):
            emit.prefetch(address, line)

    def rows(self, emit: Emitter, group: Value, first: Value, count: int) -> list[Row]:
        result: list[Row] = []
        for index in range(count):
            row = emit.at(first, index)
            scale_offset = emit.at(emit.times(row, self.scale_distance), emit.times(group, 4))
            result.append(
                Row(
                    x=emit.at(
                        self.first.x, emit.times(row, self.x_distance), emit.times(group, GROUP * self.kind.x_bytes)
                    ),
                    scale=emit.at(self.first.scale, scale_offset),
                    sums=emit.at(self.first.sums, scale_offset),
                )
            )
        return result

    def write(self, emit: Emitter, row: Value, totals: Sequence[Value]) -> None:
        """The finished sums of a row to out, or added to what is there."""
        address = emit.at(self.out, emit.times(row, self.out_distance))
        with emit.either(emit.builder.icmp_signed("!=", self.accumulate, constant(i64, 0))) as (add, put):
            with add:
                for block, total in enumerate(totals):
                    emit.store(emit.builder.fadd(emit.load(f32x8, address, 32 * block), total), address, 32 * block)
            with put:
                for block, total in enumerate(totals):
                    emit.store(total, address, 32 * block)


def emit_product(
    kind: Kind,
    emit: Emitter,
    weights: Value,
    k: Value,
    x: Value,
    scale: Value,
    sums: Value,
    x_stride: Value,
    out: Value,
    out_stride: Value,
    num_rows: Value,
    accumulate: Value,
    first_out: Value,
    end_out: Value,
) -> None:
    """The body of a product with `PARAMETERS`."""
    builder = emit.builder
    num_groups = builder.udiv(k, constant(i64, GROUP))
    unit_bytes = emit.times(num_groups, kind.group_bytes * (1 if kind.is_joined else BLOCKS))
    first_unit = builder.udiv(first_out, constant(i64, UNIT))
    with emit.loop(builder.sub(builder.udiv(end_out, constant(i64, UNIT)), first_unit)) as index:
        number = builder.add(first_unit, index)
        unit = _Unit(
            kind=kind,
            weights=emit.at(weights, emit.times(number, unit_bytes)),
            num_groups=num_groups,
            first=Row(x=x, scale=scale, sums=sums),
            x_distance=emit.times(x_stride, kind.x_bytes),
            # A float32 for each group of 32: an eighth of a byte for each activation.
            scale_distance=builder.udiv(x_stride, constant(i64, GROUP // 4)),
            out=emit.at(out, emit.times(number, UNIT * 4)),
            out_distance=emit.times(out_stride, 4),
            accumulate=accumulate,
        )
        with emit.either(builder.icmp_signed(">", num_rows, constant(i64, FEW_ROWS))) as (many, few):
            with many:
                _emit_tiles(emit, unit, num_rows)
            with few:
                for count in range(1, FEW_ROWS + 1):
                    with emit.when(builder.icmp_signed("==", num_rows, constant(i64, count))):
                        _emit_few(emit, unit, count)


def _emit_few(emit: Emitter, unit: _Unit, count: int) -> None:
    """`count` rows straight from packed weights, the sums in registers."""
    totals = [emit.variable(f32x8, constant(f32x8, 0.0)) for _ in range(count * BLOCKS)]
    with emit.loop(unit.num_groups) as group:
        unit.ask_next(emit, group)
        rows = unit.rows(emit, group, constant(i64, 0), count)
        before = [partial(emit.get, total) for total in totals]
        after = unit.kind.add_packed(emit, unit.group(emit, group), rows, before)
        for total, value in zip(totals, after, strict=True):
            emit.set(total, value)
    for row in range(count):
        unit.write(emit, constant(i64, row), [emit.get(total) for total in totals[row * BLOCKS : (row + 1) * BLOCKS]])


def _emit_tiles(emit: Emitter, unit: _Unit, num_rows: Value) -> None:
    """Any number of rows, tile by tile."""
    builder = emit.builder
    tile_rows = constant(i64, TILE_ROWS)
    num_tiles = builder.udiv(emit.at(num_rows, TILE_ROWS - 1), tile_rows)
    totals = emit.buffer(TILE_ROWS * UNIT * 4)
    scratch = emit.buffer(unit.kind.scratch_bytes) if unit.kind.scratch_bytes else None
    with emit.loop(num_tiles) as tile:
        first = builder.mul(tile, tile_rows)
        left = builder.sub(num_rows, first)
        rows = builder.select(builder.icmp_signed("<", left, tile_rows), left, tile_rows)
        with emit.loop(emit.times(rows, BLOCKS)) as vector:
            emit.store(constant(f32x8, 0.0), emit.at(totals, emit.times(vector, 32)))
        with emit.loop(unit.num_groups) as group:
            unit.ask_next(emit, group)
            blocks = unit.group(emit, group)
            if scratch is not None:
                unit.kind.unpack(emit, blocks, scratch)
            done = constant(i64, 0)
            for count in unit.kind.turns:
                num_turns = builder.udiv(builder.sub(rows, done), constant(i64, count))
                with emit.loop(num_turns) as turn:
                    row = emit.at(done, emit.times(turn, count))
                    _emit_turn(emit, unit, group, scratch, emit.at(first, row), totals, row, count)
                done = emit.at(done, emit.times(num_turns, count))
        with emit.loop(rows) as row:
            address = emit.at(totals, emit.times(row, UNIT * 4))
            unit.write(emit, emit.at(first, row), [emit.load(f32x8, address, 32 * block) for block in range(BLOCKS)])


def _emit_turn(
    emit: Emitter,
    unit: _Unit,
    group: Value,
    scratch: Value | None,
    first: Value,
    totals: Value,
    row_of_tile: Value,
    count: int,
) -> None:
    """A group for `count` rows from row `first`, their sums in memory."""
    blocks = unit.group(emit, group)
    address = emit.at(totals, emit.times(row_of_tile, UNIT * 4))
    before = [partial(emit.load, f32x8, address, 32 * vector) for vector in range(count * BLOCKS)]
    unpacked = blocks[0] if scratch is None else scratch
    after = unit.kind.add_unpacked(emit, blocks, unpacked, unit.rows(emit, group, first, count), before)
    for vector, total in enumerate(after):
        emit.store(total, address, 32 * vector)
