"""Root-mean-square norm of a row: x / sqrt(mean(x^2) + eps) * weight."""

from shared.model.kernels.cpu.vectors import FLOAT32, INT64, Emitter, Value, constant, f32, f32x8, micro_kernel

VECTOR = 8
"""Numbers that the kernels of this folder take at a time; rows are whole vectors."""


def _rms_norm(
    emit: Emitter, x: Value, weight: Value, out: Value, num_vectors: Value, inverse_size: Value, eps: Value
) -> None:
    total = emit.variable(f32x8, constant(f32x8, 0.0))
    with emit.loop(num_vectors) as index:
        part = emit.load(f32x8, emit.at(x, emit.times(index, 32)))
        emit.set(total, emit.fma(part, part, emit.get(total)))
    builder = emit.builder
    mean = builder.fmul(emit.sum_of_lanes(emit.get(total)), inverse_size)
    factor = emit.broadcast(builder.fdiv(constant(f32, 1.0), emit.root(builder.fadd(mean, eps))))
    with emit.loop(num_vectors) as index:
        distance = emit.times(index, 32)
        scaled = builder.fmul(emit.load(f32x8, emit.at(x, distance)), factor)
        emit.store(builder.fmul(scaled, emit.load(f32x8, emit.at(weight, distance))), emit.at(out, distance))


rms_norm = micro_kernel("rms_norm", [INT64, INT64, INT64, INT64, FLOAT32, FLOAT32], _rms_norm)
"""rms_norm((x, weight, out, size / 8, 1 / size, eps)), addresses of float32; `out` may be `x`."""
