"""One token's key and value of one head into its block, in the numbers of the cache.

A block holds a head's keys as [head_dim][slot] and its values as [slot][head_dim]. Numbers are rounded to the nearest,
halves to even; beyond the range of a 16-bit cache they become its largest number.
"""

from typing import Any, Final

from shared.model.kernels.cpu.vectors import (
    INT64,
    Emitter,
    MicroKernel,
    Value,
    constant,
    f32x8,
    i16,
    i32,
    select_kernel,
)

KV_FLOAT32: Final = 0
KV_FLOAT16: Final = 1
KV_BFLOAT16: Final = 2
KV_KINDS: Final = {"float32": KV_FLOAT32, "float16": KV_FLOAT16, "bfloat16": KV_BFLOAT16}
"""Types of the cache by the names of `KvLayout.dtype`, as numbers for kernels."""

_LARGEST = {KV_FLOAT16: 65504.0, KV_BFLOAT16: 3.3895313892515355e38}


def load_numbers(emit: Emitter, kind: int, address: Value, offset: int = 0) -> Value:
    """Eight numbers of the cache as float32."""
    if kind == KV_FLOAT32:
        return emit.load(f32x8, address, offset)
    return emit.load_halves(address, offset) if kind == KV_FLOAT16 else emit.load_bfloats(address, offset)


def _store_numbers(emit: Emitter, kind: int, numbers: Value, address: Value) -> None:
    if kind == KV_FLOAT32:
        emit.store(numbers, address)
        return
    largest = constant(f32x8, _LARGEST[kind])
    held = emit.smaller(emit.larger(numbers, emit.builder.fneg(largest)), largest)
    (emit.store_halves if kind == KV_FLOAT16 else emit.store_bfloats)(held, address)


class _Writer:
    """Writes the bodies for one type of the cache."""

    def __init__(self, kind: int) -> None:
        self._kind = kind
        self._item = i32 if kind == KV_FLOAT32 else i16
        self._item_bytes = 4 if kind == KV_FLOAT32 else 2

    def key(self, emit: Emitter, x: Value, out: Value, stride: Value, num_vectors: Value) -> None:
        narrowed = emit.buffer(32)
        with emit.loop(num_vectors) as index:
            _store_numbers(emit, self._kind, emit.load(f32x8, emit.at(x, emit.times(index, 32))), narrowed)
            first = emit.at(out, emit.times(emit.times(index, 8), stride))
            for lane in range(8):
                number = emit.load(self._item, narrowed, lane * self._item_bytes)
                emit.store(number, emit.at(first, emit.times(stride, lane)))

    def value(self, emit: Emitter, x: Value, out: Value, num_vectors: Value) -> None:
        with emit.loop(num_vectors) as index:
            numbers = emit.load(f32x8, emit.at(x, emit.times(index, 32)))
            _store_numbers(emit, self._kind, numbers, emit.at(out, emit.times(index, 8 * self._item_bytes)))


write_key: Final[Any] = select_kernel(
    {kind: MicroKernel(f"write_key_{name}", [INT64] * 4, _Writer(kind).key) for name, kind in KV_KINDS.items()}
)
"""write_key(kind, (x, out, stride, head_dim / 8)): the head_dim float32 at `x` to `out`, `stride` bytes apart."""
write_value: Final[Any] = select_kernel(
    {kind: MicroKernel(f"write_value_{name}", [INT64] * 3, _Writer(kind).value) for name, kind in KV_KINDS.items()}
)
"""write_value(kind, (x, out, head_dim / 8)): the head_dim float32 at `x` to `out`, one after the other."""
