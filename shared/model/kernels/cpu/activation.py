"""What stands between two products of a layer: the gated SiLU, and the bias of queries, keys and values."""

from shared.model.kernels.cpu.vectors import INT64, Emitter, Value, constant, f32x8, micro_kernel


def _silu_times(emit: Emitter, gate: Value, up: Value, out: Value, num_vectors: Value) -> None:
    builder = emit.builder
    with emit.loop(num_vectors) as index:
        distance = emit.times(index, 32)
        x = emit.load(f32x8, emit.at(gate, distance))
        decay = emit.exp(builder.fneg(x))
        silu = builder.fdiv(x, builder.fadd(decay, constant(f32x8, 1.0)))
        emit.store(builder.fmul(silu, emit.load(f32x8, emit.at(up, distance))), emit.at(out, distance))


def _add_to(emit: Emitter, x: Value, summand: Value, num_vectors: Value) -> None:
    with emit.loop(num_vectors) as index:
        distance = emit.times(index, 32)
        here = emit.at(x, distance)
        emit.store(emit.builder.fadd(emit.load(f32x8, here), emit.load(f32x8, emit.at(summand, distance))), here)


silu_times = micro_kernel("silu_times", [INT64] * 4, _silu_times)
"""silu_times((gate, up, out, size / 8)): out = gate / (1 + exp(-gate)) * up, addresses of float32."""
add_to = micro_kernel("add_to", [INT64] * 3, _add_to)
"""add_to((x, summand, size / 8)): x += summand, addresses of float32."""
