"""The parts of a decoder layer in plain torch, each giving a row the same bits whatever rows stand beside it."""

from typing import Any, Protocol, cast

import numpy.typing as npt
import torch
import torch.nn.functional as functional

from shared.model.numerics import GROUP

TILE_ROWS = 16
"""Rows of every product that torch computes itself: the bits of a row depend on how many rows there are."""
_SMALLEST = 1e-20  # a group of activations that is all zeros still gets a scale that can be divided by


class Linear(Protocol):
    """x [rows, in] times a fixed matrix; returns float32 [rows, out]."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


class PackedLinear:
    """The float32 product by oneDNN with the matrix packed once.

    Row-invariant without padding (measured for 1 to 64 rows and up to 256, on one and two threads), and for few rows
    twice as fast as `linear`, which packs the matrix anew at every call. The operators are those of torch's own
    compiler.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        operators = cast("Any", torch.ops).mkldnn
        self._multiply = operators._linear_pointwise
        self._packed = operators._reorder_linear_weight(weight, TILE_ROWS)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._multiply(rows, self._packed, None, "none", [], "")


class TiledLinear:
    """torch's own product in the matrix's type, always on 16 rows: any device, any type, the same bits."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(rows, (0, 0, 0, -rows.shape[0] % TILE_ROWS)).to(self._weight.dtype)
        starts = range(0, padded.shape[0], TILE_ROWS)
        tiles = [functional.linear(padded[start : start + TILE_ROWS], self._weight) for start in starts]
        return torch.cat(tiles)[: rows.shape[0]].float()


class RoundedLinear:
    """A product whose activations are rounded to integers first, with one scale for a token's group of 32."""

    def __init__(self, inner: Linear, bits: int) -> None:
        self._inner = inner
        self._bits = bits

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._inner(rounded(rows, self._bits))


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """The same memory as a tensor; writes go through."""
    return cast("Any", torch).from_numpy(array)


def make_linear(weight: torch.Tensor, activation_bits: int | None) -> Linear:
    """The fastest row-invariant product of this build and device; `weight` [out, in] may be dropped afterwards."""
    is_packable = weight.dtype == torch.float32 and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    inner = PackedLinear(weight) if is_packable else TiledLinear(weight)
    return inner if activation_bits is None else RoundedLinear(inner, activation_bits)


def rounded(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """What is left of float32 rows [rows, k] after rounding to signed integers of so many bits, half to even.

    The scale of a group of 32 is its largest magnitude divided by the largest integer.
    """
    # As a tensor: torch divides a plain number by a tensor through the reciprocal, which rounds twice.
    limit = torch.tensor(2.0 ** (bits - 1) - 1, device=rows.device)
    groups = rows.view(rows.shape[0], -1, GROUP)
    largest = groups.abs().amax(dim=-1, keepdim=True).clamp_min(_SMALLEST)
    integers = torch.round(groups * (limit / largest))
    return (integers * (largest / limit)).view_as(rows)


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn heads [rows, heads, head_dim] by their rows' angles [rows, 1, head_dim / 2]; returns a new tensor."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scale: float) -> torch.Tensor:
    """Causal attention of one sequence: queries [rows, heads, head_dim] at positions `start`, `start` + 1, ...

    `keys` [kv heads, head_dim, length], `values` [kv heads, length, head_dim]. Returns [rows, heads * head_dim]. Row
    for row, each on exactly the positions that it sees: its bits depend neither on its chunk nor on what comes later.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[0]
    grouped = queries.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim) * scale
    mixed: list[torch.Tensor] = []
    for row in range(num_rows):
        end = start + row + 1
        scores = torch.bmm(grouped[row], keys[:, :, :end].contiguous())
        mixed.append(torch.bmm(torch.softmax(scores, dim=-1), values[:, :end].contiguous()).view(-1))
    return torch.stack(mixed)
