"""The products that a model step is made of, by mode, for use in compiled code.

Memory of activations, by the address of row 0; `stride` counts activations between rows, a multiple of 32:

    x      float32 [rows, stride] for F32, Q4F32 and Q8F32; int16 [rows, stride] for Q4A16 and Q8A16, in each eight the
           order PAIR_ORDER; int8 [rows, stride] for Q4A8
    scale  float32 [rows, stride/32]: x = scale * integer
    sums   float32 [rows, stride/32]: scale * sum of the group's integers

Weights are what `packing` makes: F32 of pack_f32, Q4* of pack_q4, Q8* of pack_q8.
"""

from functools import partial
from typing import Any, Final

from shared.model.kernels.cpu.float_products import FloatKind
from shared.model.kernels.cpu.integer_products import IntegerKind
from shared.model.kernels.cpu.products import PARAMETERS, Kind, emit_product
from shared.model.kernels.cpu.vectors import MicroKernel, select_kernel

F32: Final = 0
Q4F32: Final = 1
Q4A16: Final = 2
Q4A8: Final = 3
Q8A16: Final = 4
Q8F32: Final = 5

HEAD_MODES: Final = {F32: F32, Q4F32: Q8F32, Q4A16: Q8A16, Q4A8: Q8A16, Q8A16: Q8A16}
"""Mode of the head for each mode of the body: logits decide the token, so no 8-bit activations there."""

_KINDS: Final[dict[int, tuple[str, Kind]]] = {
    F32: ("f32", FloatKind(weight_bits=32)),
    Q4F32: ("q4f32", FloatKind(weight_bits=4)),
    Q4A16: ("q4a16", IntegerKind(weight_bits=4, activation_bits=16)),
    Q4A8: ("q4a8", IntegerKind(weight_bits=4, activation_bits=8)),
    Q8A16: ("q8a16", IntegerKind(weight_bits=8, activation_bits=16)),
    Q8F32: ("q8f32", FloatKind(weight_bits=8)),
}

linear_range: Final[Any] = select_kernel(
    {
        mode: MicroKernel(f"linear_{name}", PARAMETERS, partial(emit_product, kind))
        for mode, (name, kind) in _KINDS.items()
    }
)
"""linear_range(mode, (weights, k, x, scale, sums, stride, out, out_stride, num_rows, accumulate, first_out, end_out)):
out[row, first_out:end_out] = (or +=, where accumulate is 1) x[row, :k] . weights, in float32.

`first_out` and `end_out` are multiples of 16; a range has the bits that the whole would have, and a row those that it
would have alone. out_stride counts float32. Where `mode` is a constant of the calling function only its code is
compiled; else the call chooses among all.
"""
