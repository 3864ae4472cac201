"""Rotary angles: cosine and sine of every position, computed as transformers does, without torch."""

import math

import numpy as np
import numpy.typing as npt

from shared.model.config import RopeConfig


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float32]:
    """Radians a position, [head_dim / 2]: theta ** (-2i / head_dim), stretched as `rope` says."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power is rounded once from float64: the same on every machine, and within a rounding of torch's own.
    powers = (np.float64(rope.theta) ** exponents.astype(np.float64)).astype(np.float32)
    frequencies: npt.NDArray[np.float32] = np.float32(1) / powers
    match rope.kind:
        case "linear":
            return frequencies / np.float32(rope.factor)
        case "llama3":
            return _stretch_low_frequencies(frequencies, rope)
        case _:
            return frequencies


def rotary_table(
    rope: RopeConfig, head_dim: int, window: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines [window, head_dim / 2]; number i turns the numbers i and i + head_dim / 2 of a head."""
    angles = np.outer(np.arange(window, dtype=np.float32), rotary_frequencies(rope, head_dim)).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _stretch_low_frequencies(frequencies: npt.NDArray[np.float32], rope: RopeConfig) -> npt.NDArray[np.float32]:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1)."""
    wavelengths = np.float32(2 * math.pi) / frequencies
    longest, shortest = rope.original_window / rope.low_freq_factor, rope.original_window / rope.high_freq_factor
    span = np.float32(rope.high_freq_factor - rope.low_freq_factor)
    blend = (np.float32(rope.original_window) / wavelengths - np.float32(rope.low_freq_factor)) / span
    slow = frequencies / np.float32(rope.factor)
    blended = (1 - blend) * slow + blend * frequencies
    stretched = np.where(wavelengths > longest, slow, blended)
    return np.where(wavelengths < shortest, frequencies, stretched).astype(np.float32)
