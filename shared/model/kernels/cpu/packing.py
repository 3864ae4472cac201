"""Memory of packed weights, and the packing of plain arrays into it and back.

A weight matrix [out, k] is cut into units of 16 outputs; a unit is what one thread multiplies at a time, and follows
the one before it without a gap. `k` is cut into groups of 32, each with its own scale. `out` is padded to whole units
with zero rows (`padded_outputs`); k must be a multiple of 32.

float32: a unit is [k][16] float32, outputs innermost.

q4 (weights d*q + m, q in 0..15) and q8 (weights d*q, q in -127..127): a unit is two blocks of 8 outputs, a block is
[group] of

    q4, 160 bytes                                q8, 272 bytes
    0    d, 8 float16, one for each output       0    d, 8 float16, one for each output
    16   m, 8 float16                            16   16 vectors of 16 bytes
    32   4 vectors of 32 bytes

    q4: byte 4*o + c of vector j holds, for output o of the block, k = 8j + c in its low four bits and
    k = 8j + 4 + c in its high four bits. The same bytes serve all three ways of multiplying:
    - by int8: the low halves of all bytes against x[8j .. 8j+3] in each four lanes, then the high halves;
    - by float32: k by k, a shift of the eight 32-bit lanes;
    - by int16: nibble n (of four) of each of the sixteen 16-bit lanes, two lanes for each output, is the pair
      k = 8j + PAIRS[n]. Activations in int16 are stored in the order PAIR_ORDER so that a pair is 32 neighbouring bits.

    q8: byte 2*o + h of vector 4j + n holds k = 8j + PAIRS[n][h].
"""

from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

GROUP: Final = 32
"""Neighbouring weights of an output that share a scale, as in the 4-bit and 8-bit types of GGUF."""
UNIT: Final = 16
"""Outputs multiplied together: two vectors of eight float32."""
BLOCK: Final = 8
"""Outputs interleaved in a quantised block: the lanes of a vector of 32-bit numbers."""
PAIRS: Final = ((0, 2), (4, 6), (1, 3), (5, 7))
"""Which two of eight neighbouring k lie together for products of int16."""
PAIR_ORDER: Final = tuple(k for pair in PAIRS for k in pair)
"""Order in which int16 activations of eight neighbouring k are stored."""
Q4_GROUP_BYTES: Final = 160
Q8_GROUP_BYTES: Final = 272
F32_GROUP_BYTES: Final = GROUP * UNIT * 4

Scalar = TypeVar("Scalar", bound=np.generic)


def padded_outputs(num_outputs: int) -> int:
    """Rows of the packed matrix for `num_outputs` outputs: whole units."""
    return -(-num_outputs // UNIT) * UNIT


def pack_f32(weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """[out, k] float32 as bytes [unit, k * 64]."""
    padded = _padded(weights)
    units = padded.reshape(-1, UNIT, padded.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(units).view(np.uint8).reshape(units.shape[0], -1)


def unpack_f32(packed: NDArray[np.uint8], num_outputs: int) -> NDArray[np.float32]:
    """What was packed: [out, k] float32."""
    units = packed.view(np.float32).reshape(packed.shape[0], -1, UNIT)
    return np.ascontiguousarray(units.transpose(0, 2, 1)).reshape(-1, units.shape[1])[:num_outputs]


def pack_q4(codes: NDArray[np.uint8], scales: NDArray[np.float16], minima: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Codes [out, k] in 0..15, d and m [out, k/32], as bytes [unit, k/32 * 320].

    Raises ValueError for codes that take more than four bits and for numbers that are not finite.
    """
    if int(codes.max(initial=0)) > 15:
        raise ValueError("a code of a 4-bit weight is above 15")
    padded = _padded(codes)
    num_groups = padded.shape[1] // GROUP
    # [block, output, group, vector, half, byte] -> [block, group, vector, output, byte, half]
    halves = padded.reshape(-1, BLOCK, num_groups, 4, 2, 4).transpose(0, 2, 3, 1, 5, 4)
    nibbles = (halves[..., 0] | (halves[..., 1] << np.uint8(4))).reshape(-1, num_groups, 128)
    return _units([_group_scales(scales), _group_scales(minima), nibbles])


def unpack_q4(
    packed: NDArray[np.uint8], num_outputs: int
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Codes, d and m as they were packed."""
    groups = packed.reshape(packed.shape[0] * 2, -1, Q4_GROUP_BYTES)
    num_groups = groups.shape[1]
    nibbles = groups[:, :, 32:].reshape(-1, num_groups, 4, BLOCK, 4)
    halves = np.stack([nibbles & np.uint8(15), nibbles >> np.uint8(4)], axis=-1)
    codes = np.ascontiguousarray(halves.transpose(0, 3, 1, 2, 5, 4)).reshape(-1, num_groups * GROUP)
    scales, minima = (_plain_scales(groups[:, :, start : start + 16]) for start in (0, 16))
    return codes[:num_outputs], scales[:num_outputs], minima[:num_outputs]


def pack_q8(codes: NDArray[np.int8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Codes [out, k], d [out, k/32], as bytes [unit, k/32 * 544]. Raises ValueError for numbers that are not finite."""
    padded = _padded(codes)
    num_groups = padded.shape[1] // GROUP
    paired = padded.reshape(-1, BLOCK, num_groups, 4, 8)[..., list(PAIR_ORDER)]
    # [block, output, group, eight, pair, half] -> [block, group, eight, pair, output, half]
    vectors = paired.reshape(-1, BLOCK, num_groups, 4, 4, 2).transpose(0, 2, 3, 4, 1, 5)
    return _units([_group_scales(scales), np.ascontiguousarray(vectors).view(np.uint8).reshape(-1, num_groups, 256)])


def unpack_q8(packed: NDArray[np.uint8], num_outputs: int) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Codes and d as they were packed."""
    groups = packed.reshape(packed.shape[0] * 2, -1, Q8_GROUP_BYTES)
    num_groups = groups.shape[1]
    vectors = np.ascontiguousarray(groups[:, :, 16:]).view(np.int8).reshape(-1, num_groups, 4, 4, BLOCK, 2)
    paired = vectors.transpose(0, 4, 1, 2, 3, 5).reshape(-1, num_groups, 4, 8)
    codes = np.empty_like(paired)
    codes[..., list(PAIR_ORDER)] = paired
    return codes.reshape(-1, num_groups * GROUP)[:num_outputs], _plain_scales(groups[:, :, :16])[:num_outputs]


def _padded(matrix: NDArray[Scalar]) -> NDArray[Scalar]:
    if matrix.ndim != 2 or matrix.shape[1] % GROUP:
        raise ValueError(f"a matrix of shape {matrix.shape} has no whole groups of {GROUP}")
    missing = padded_outputs(matrix.shape[0]) - matrix.shape[0]
    return np.concatenate([matrix, np.zeros((missing, matrix.shape[1]), matrix.dtype)]) if missing else matrix


def _group_scales(scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """[out, group] as bytes [block, group, 16]."""
    if not np.isfinite(scales).all():
        raise ValueError("a scale of the weights is not finite")
    missing = padded_outputs(scales.shape[0]) - scales.shape[0]
    padded = np.concatenate([scales, np.zeros((missing, scales.shape[1]), np.float16)])
    blocks = padded.reshape(-1, BLOCK, scales.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(-1, scales.shape[1], 16)


def _plain_scales(scales: NDArray[np.uint8]) -> NDArray[np.float16]:
    """Bytes [block, group, 16] as [out, group]."""
    blocks = np.ascontiguousarray(scales).view(np.float16)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1)).reshape(-1, blocks.shape[1])


def _units(parts: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Parts [block, group, bytes] joined and laid out as [unit, bytes]."""
    blocks = np.concatenate(parts, axis=-1)
    return blocks.reshape(blocks.shape[0] // 2, -1)
