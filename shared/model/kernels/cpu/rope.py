"""Rotary positions: turns the numbers i and i + head_dim / 2 of a head by the angle of its token's position."""

from shared.model.kernels.cpu.vectors import FLOAT32, INT64, Emitter, Value, f32x8, micro_kernel


def _rotate_head(
    emit: Emitter, x: Value, cosines: Value, sines: Value, out: Value, half_vectors: Value, factor: Value
) -> None:
    builder, factors = emit.builder, emit.broadcast(factor)
    half_bytes = emit.times(half_vectors, 32)
    with emit.loop(half_vectors) as index:
        distance = emit.times(index, 32)
        low, high = emit.at(x, distance), emit.at(x, distance, half_bytes)
        a, b = emit.load(f32x8, low), emit.load(f32x8, high)
        cosine, sine = emit.load(f32x8, emit.at(cosines, distance)), emit.load(f32x8, emit.at(sines, distance))
        turned_a = emit.fma(builder.fneg(b), sine, builder.fmul(a, cosine))
        turned_b = emit.fma(a, sine, builder.fmul(b, cosine))
        emit.store(builder.fmul(turned_a, factors), emit.at(out, distance))
        emit.store(builder.fmul(turned_b, factors), emit.at(out, distance, half_bytes))


rotate_head = micro_kernel("rotate_head", [INT64, INT64, INT64, INT64, INT64, FLOAT32], _rotate_head)
"""rotate_head((x, cosines, sines, out, head_dim / 16, factor)): the turned head times `factor`; `out` may be `x`.

Addresses of float32; cosines and sines are the head_dim / 2 numbers of the position.
"""
