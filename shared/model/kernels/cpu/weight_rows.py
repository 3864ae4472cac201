"""One row of packed weights as float32: embeddings are read from the packed head, without a second table."""

from typing import Any, Final

from shared.model.kernels.cpu.packing import (
    BLOCK,
    F32_GROUP_BYTES,
    GROUP,
    PAIR_ORDER,
    Q8_GROUP_BYTES,
    UNIT,
)
from shared.model.kernels.cpu.vectors import (
    INT64,
    Emitter,
    Value,
    constant,
    f32,
    f32x8,
    i8,
    i32,
    i32x8,
    i64,
    ir,
    micro_kernel,
)


def _emit_q8_row(emit: Emitter, weights: Value, row: Value, k: Value, out: Value) -> None:
    builder = emit.builder
    num_groups = builder.udiv(k, constant(i64, GROUP))
    block, lane = builder.udiv(row, constant(i64, BLOCK)), builder.urem(row, constant(i64, BLOCK))
    block_at = emit.at(weights, builder.mul(block, emit.times(num_groups, Q8_GROUP_BYTES)))
    with emit.loop(num_groups) as group:
        group_at = emit.at(block_at, emit.times(group, Q8_GROUP_BYTES))
        multipliers = emit.load_halves(group_at)
        multiplier = emit.broadcast(builder.extract_element(multipliers, builder.trunc(lane, i32)))
        codes_at = emit.at(group_at, emit.times(lane, 2))
        out_at = emit.at(out, emit.times(group, GROUP * 4))
        for eight in range(GROUP // 8):
            codes = ir.Constant(i32x8, ir.Undefined)
            for k_of_eight in range(8):
                pair, half = divmod(PAIR_ORDER.index(k_of_eight), 2)
                code = emit.load(i8, codes_at, 16 + 16 * (4 * eight + pair) + half)
                codes = builder.insert_element(codes, builder.sext(code, i32), constant(i32, k_of_eight))
            emit.store(builder.fmul(builder.sitofp(codes, f32x8), multiplier), out_at, 32 * eight)


def _emit_f32_row(emit: Emitter, weights: Value, row: Value, k: Value, out: Value) -> None:
    builder = emit.builder
    unit, lane = builder.udiv(row, constant(i64, UNIT)), builder.urem(row, constant(i64, UNIT))
    num_groups = builder.udiv(k, constant(i64, GROUP))
    column = emit.at(weights, builder.mul(unit, emit.times(num_groups, F32_GROUP_BYTES)), emit.times(lane, 4))
    with emit.loop(k) as each:
        emit.store(emit.load(f32, emit.at(column, emit.times(each, UNIT * 4))), emit.at(out, emit.times(each, 4)))


_PARAMETERS: Final = (INT64,) * 4

read_q8_row: Final[Any] = micro_kernel("read_q8_row", _PARAMETERS, _emit_q8_row)
"""read_q8_row((weights, row, k, out)): d * q of one row of pack_q8's bytes, k float32 to `out`."""
read_f32_row: Final[Any] = micro_kernel("read_f32_row", _PARAMETERS, _emit_f32_row)
"""read_f32_row((weights, row, k, out)): one row of pack_f32's bytes, k float32 to `out`."""
