"""Products of the cpu kernels on plain arrays, and arithmetic to hold them against.

Run as a program it prints a digest of each mode's results: the same on every CPU, which a test asks of two.
"""

import ctypes
import ctypes.util
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast

import numba
import numpy as np
from numpy.typing import NDArray

from shared.model.kernels.cpu.activations import quantise_int8, quantise_int16
from shared.model.kernels.cpu.linear import F32, Q4A8, Q4A16, Q4F32, Q8A16, Q8F32, linear_range
from shared.model.kernels.cpu.packing import GROUP, PAIR_ORDER, UNIT, pack_f32, pack_q4, pack_q8, padded_outputs
from shared.model.kernels.cpu.weight_rows import read_f32_row, read_q8_row

MODES: Final = {"f32": F32, "q4f32": Q4F32, "q4a16": Q4A16, "q4a8": Q4A8, "q8a16": Q8A16, "q8f32": Q8F32}
INTEGER_MODES: Final = {"q4a16": Q4A16, "q4a8": Q4A8, "q8a16": Q8A16}

njit: Final = cast("Any", numba).njit(nogil=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A random matrix of one mode: what it is packed from, its bytes, and the float32 numbers it stands for."""

    codes: NDArray[np.int64]
    scales: NDArray[np.float16]
    minima: NDArray[np.float16]
    packed: NDArray[np.uint8]
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Rows as a mode takes them. `q` is in plain order, `x` is what the kernel reads."""

    x: NDArray[Any]
    q: NDArray[np.int64]
    scale: NDArray[np.float32]
    sums: NDArray[np.float32]

    def take(self, rows: list[int]) -> "Activations":
        """These rows, in this order."""
        return Activations(x=self.x[rows], q=self.q[rows], scale=self.scale[rows], sums=self.sums[rows])


def make_weights(mode: int, num_outputs: int, k: int, seed: int = 1) -> Weights:
    """Random weights for a mode; the 4-bit modes of one seed are the same matrix, and so are the 8-bit ones."""
    random = np.random.default_rng(seed)
    shape, groups = (num_outputs, k), (num_outputs, k // GROUP)
    is_byte = mode in (Q8A16, Q8F32)
    codes = random.integers(-127, 128, shape) if is_byte else random.integers(0, 16, shape)
    scales = (random.random(groups) * 0.01 + 0.001).astype(np.float16)
    minima = np.zeros(groups, np.float16) if is_byte else (random.standard_normal(groups) * 0.05).astype(np.float16)
    spread = [np.repeat(each.astype(np.float32), GROUP, axis=1) for each in (scales, minima)]
    values = codes.astype(np.float32) * spread[0] + spread[1]
    if is_byte:
        packed = pack_q8(codes.astype(np.int8), scales)
    elif mode == F32:
        packed = pack_f32(values)
    else:
        packed = pack_q4(codes.astype(np.uint8), scales, minima)
    return Weights(codes=codes, scales=scales, minima=minima, packed=packed, values=values)


def make_rows(num_rows: int, k: int, seed: int = 2) -> NDArray[np.float32]:
    """Random activations whose groups differ in size by some orders of magnitude."""
    random = np.random.default_rng(seed)
    sizes = np.exp(random.standard_normal((num_rows, k // GROUP)) * 2)
    return (random.standard_normal((num_rows, k)) * np.repeat(sizes, GROUP, axis=1)).astype(np.float32)


def prepare_rows(mode: int, rows: NDArray[np.float32]) -> Activations:
    """The rows as the mode takes them, rounded by the kernels."""
    scale = np.zeros((rows.shape[0], rows.shape[1] // GROUP), np.float32)
    sums = np.zeros_like(scale)
    if mode not in INTEGER_MODES.values():
        return Activations(x=rows, q=np.zeros(rows.shape, np.int64), scale=scale, sums=sums)
    x = np.zeros(rows.shape, np.int8 if mode == Q4A8 else np.int16)
    kernel = _quantise_int8 if mode == Q4A8 else _quantise_int16
    kernel()(rows.ctypes.data, x.ctypes.data, scale.ctypes.data, sums.ctypes.data, rows.size // GROUP)
    return Activations(x=x, q=plain_order(x).astype(np.int64), scale=scale, sums=sums)


def plain_order(x: NDArray[Any]) -> NDArray[Any]:
    """int16 activations as stored for pair products, in the order of k; int8 ones as they are."""
    if x.dtype != np.int16:
        return x
    eights = x.reshape(x.shape[0], -1, 8)
    plain = np.empty_like(eights)
    plain[..., list(PAIR_ORDER)] = eights
    return plain.reshape(x.shape)


def multiply(
    mode: int,
    weights: Weights,
    activations: Activations,
    *,
    out: NDArray[np.float32] | None = None,
    num_rows: int | None = None,
    outputs: tuple[int, int] | None = None,
    accumulate: bool = False,
) -> NDArray[np.float32]:
    """The product [rows, padded outputs], into `out` where given."""
    rows, k = activations.x.shape
    padded = padded_outputs(weights.values.shape[0])
    if out is None:
        out = np.full((rows, padded), 7.0, np.float32)
    first, end = outputs or (0, padded)
    linear(mode)(
        weights.packed.ctypes.data,
        k,
        activations.x.ctypes.data,
        activations.scale.ctypes.data,
        activations.sums.ctypes.data,
        k,
        out.ctypes.data,
        out.shape[1],
        rows if num_rows is None else num_rows,
        int(accumulate),
        first,
        end,
    )
    return out


@cache
def linear(mode: int) -> Callable[..., None]:
    """`linear_range` of one mode, compiled once for all tests."""

    def run(
        w: int, k: int, x: int, scale: int, sums: int, stride: int, out: int, out_stride: int, num_rows: int,
        accumulate: int, first: int, end: int,
    ) -> None:  # fmt: skip
        linear_range(mode, (w, k, x, scale, sums, stride, out, out_stride, num_rows, accumulate, first, end))

    return njit(run)


@cache
def _quantise_int16() -> Callable[..., None]:
    def run(x: int, q: int, scale: int, sums: int, num_groups: int) -> None:
        quantise_int16((x, q, scale, sums, num_groups))

    return njit(run)


@cache
def _quantise_int8() -> Callable[..., None]:
    def run(x: int, q: int, scale: int, sums: int, num_groups: int) -> None:
        quantise_int8((x, q, scale, sums, num_groups))

    return njit(run)


def read_row(mode: int, weights: Weights, row: int) -> NDArray[np.float32]:
    """A row of packed float32 or 8-bit weights."""
    out = np.zeros(weights.values.shape[1], np.float32)
    (_read_f32_row if mode == F32 else _read_q8_row)()(weights.packed.ctypes.data, row, out.size, out.ctypes.data)
    return out


@cache
def _read_f32_row() -> Callable[..., None]:
    def run(w: int, row: int, k: int, out: int) -> None:
        read_f32_row((w, row, k, out))

    return njit(run)


@cache
def _read_q8_row() -> Callable[..., None]:
    def run(w: int, row: int, k: int, out: int) -> None:
        read_q8_row((w, row, k, out))

    return njit(run)


@cache
def _fmaf() -> Callable[[float, float, float], float]:
    function = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    function.argtypes = [ctypes.c_float] * 3
    function.restype = ctypes.c_float
    return function


def fused(a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> NDArray[np.float32]:
    """a x b + c, element by element with one rounding, by the C library."""
    function = _fmaf()
    arrays = np.broadcast_arrays(a, b, c)
    flat = [function(*values) for values in zip(*(each.ravel().tolist() for each in arrays), strict=True)]
    return np.array(flat, np.float32).reshape(arrays[0].shape)


def digests() -> dict[str, str]:
    """By mode, of the bytes of products with 1 to 7 rows and of the rounded rows."""
    rows = make_rows(7, 96)
    result: dict[str, str] = {}
    for name, mode in MODES.items():
        activations = prepare_rows(mode, rows)
        digest = hashlib.blake2b(activations.x.tobytes() + activations.scale.tobytes() + activations.sums.tobytes())
        for count in (1, 2, 7):
            taken = activations.take(list(range(count)))
            digest.update(multiply(mode, make_weights(mode, 2 * UNIT, 96), taken).tobytes())
        if mode in (F32, Q8F32):
            digest.update(read_row(mode, make_weights(mode, 2 * UNIT, 96), 19).tobytes())
        result[name] = digest.hexdigest()
    return result


if __name__ == "__main__":
    print(json.dumps(digests()))
