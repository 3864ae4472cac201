"""Quantised matrices as a source has them or as preparation makes them: integers in groups of 32 with their scales.

A matrix [rows, k] is cut along k: number i of a row is d * q[i] (+ m), where d and m are those of group i // 32. In a
safetensors file it is `<name>.q`, `<name>.d` and, with 4 bits, `<name>.m`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.model.numerics import GROUP

_LARGEST_INT8 = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """`q` [rows, k]: uint8 0 ... 15 for 4 bits, int8 for 8; `d`, `m` float16 [rows, k / 32], `m` None for 8 bits."""

    q: npt.NDArray[Any]
    d: npt.NDArray[np.float16]
    m: npt.NDArray[np.float16] | None

    @property
    def is_4bit(self) -> bool:
        return self.m is not None

    def dequantised(self) -> npt.NDArray[np.float32]:
        """[rows, k]: product and sum each rounded to float32, as the readers of the source's format do."""
        rows, columns = self.q.shape
        values = self.q.reshape(rows, -1, GROUP).astype(np.float32) * self.d.astype(np.float32)[:, :, None]
        if self.m is not None:
            values += self.m.astype(np.float32)[:, :, None]
        return values.reshape(rows, columns)

    def to_tensors(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """As they are kept in a file; 4-bit integers two to a byte, the even column in the lower half."""
        q = self.q if self.m is None else self.q[:, 0::2] | self.q[:, 1::2] << 4
        tensors: dict[str, npt.NDArray[Any]] = {f"{name}.q": np.ascontiguousarray(q), f"{name}.d": self.d}
        return tensors if self.m is None else tensors | {f"{name}.m": self.m}

    @staticmethod
    def from_tensors(tensors: Mapping[str, npt.NDArray[Any]], name: str) -> "Groups":
        """The way back; KeyError when the file has no such matrix."""
        q, d, m = tensors[f"{name}.q"], tensors[f"{name}.d"], tensors.get(f"{name}.m")
        if m is not None:
            q = np.stack((q & 15, q >> 4), axis=-1).reshape(len(q), -1)
        return Groups(q=q, d=d, m=m)

    @staticmethod
    def joined(parts: "list[Groups]") -> "Groups":
        """The rows of all parts, one part after the other; all have the same bits."""
        minima = [part.m for part in parts if part.m is not None]
        return Groups(
            q=np.concatenate([part.q for part in parts]),
            d=np.concatenate([part.d for part in parts]),
            m=np.concatenate(minima) if minima else None,
        )


def quantised(matrix: npt.NDArray[np.float32]) -> Groups:
    """The nearest 8-bit groups of a float32 matrix [rows, k]: d is a group's largest magnitude / 127 in float16.

    A matrix that came out of such groups goes back into them. Raises ValueError for numbers beyond float16's range.
    """
    groups = matrix.reshape(len(matrix), -1, GROUP)
    with np.errstate(over="ignore"):  # told below
        d = (np.abs(groups).max(axis=-1) / np.float32(_LARGEST_INT8)).astype(np.float16)
    if not np.isfinite(d).all():
        raise ValueError("weights are beyond the range of 8-bit groups")
    # The integers are chosen for the scale as it is kept. A group whose scale rounds to zero is zero.
    kept = d.astype(np.float32)[:, :, None]
    q = np.rint(np.divide(groups, kept, out=np.zeros_like(groups), where=kept > 0))
    q = np.clip(q, -_LARGEST_INT8, _LARGEST_INT8).astype(np.int8)
    return Groups(q=q.reshape(matrix.shape), d=d, m=None)
