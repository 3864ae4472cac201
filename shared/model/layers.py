"""The parts of a decoder layer, each giving a row the same bits whatever rows stand beside it."""

import math
from typing import Any, Protocol, cast

import numpy.typing as npt
import torch
import torch.nn.functional as functional

from shared.model.config import RopeConfig

ROW_MULTIPLE = 16
"""Padding for torch's own float32 product, which gives a row other bits in small batches (docs/performance.md)."""


class Linear(Protocol):
    """x [rows, in] times a fixed matrix; returns [rows, out]."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


class PackedLinear:
    """The product by oneDNN with the matrix packed once.

    Row-invariant without padding (measured for 1 to 64 rows and up to 256, on one and two threads), and for few rows
    twice as fast as `linear`, which packs the matrix anew at every call. The operators are those of torch's own
    compiler.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        operators = cast("Any", torch.ops).mkldnn
        self._multiply = operators._linear_pointwise
        self._packed = operators._reorder_linear_weight(weight, ROW_MULTIPLE)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._multiply(rows, self._packed, None, "none", [], "")


class PaddedLinear:
    """torch's own product, on a multiple of 16 rows: for builds without oneDNN."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        missing = -rows.shape[0] % ROW_MULTIPLE
        padded = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        return functional.linear(padded, self._weight)[: rows.shape[0]]


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """The same memory as a tensor; writes go through."""
    return cast("Any", torch).from_numpy(array)


def make_linear(weight: torch.Tensor) -> Linear:
    """The fastest row-invariant product that this build of torch has; `weight` [out, in] may be dropped afterwards."""
    return PackedLinear(weight) if torch.backends.mkldnn.is_available() else PaddedLinear(weight)


def rotary_table(rope: RopeConfig, head_dim: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [window, head_dim], the two halves of a head alike."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    match rope.kind:
        case "linear":
            frequencies = frequencies / rope.factor
        case "llama3":
            frequencies = _stretch_low_frequencies(frequencies, rope)
        case _:
            pass
    angles = torch.outer(torch.arange(window, dtype=torch.int64).float(), frequencies)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def _stretch_low_frequencies(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = rope.original_window / rope.low_freq_factor, rope.original_window / rope.high_freq_factor
    blend = (rope.original_window / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, blended)
    return torch.where(wavelengths < shortest, frequencies, stretched)


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn heads [rows, heads, head_dim] by their rows' angles [rows, 1, head_dim]; returns a new tensor."""
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cosines + turned * sines


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention of one sequence: queries [rows, heads, head_dim] over keys and values [kv heads, length, head_dim].

    `mask` [rows, length] is added to the scores (None for a single row, which sees every key). Returns [rows, heads *
    head_dim]. The shapes are the sequence's own, so its bits do not depend on other sequences.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads, length, _ = keys.shape
    group = num_heads // num_kv_heads
    grouped = queries.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    scores = torch.bmm(grouped.reshape(num_kv_heads, group * num_rows, head_dim) * scale, keys.transpose(1, 2))
    if mask is not None:
        scores = scores.view(num_kv_heads, group, num_rows, length).add_(mask).view(num_kv_heads, -1, length)
    mixed = torch.bmm(torch.softmax(scores, dim=-1), values)
    return mixed.view(num_kv_heads, group, num_rows, head_dim).permute(2, 0, 1, 3).reshape(num_rows, -1)
