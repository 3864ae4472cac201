"""A safetensors file whose tensors begin at multiples of 64 bytes, so that kernels may work on the mapped file itself.

    8 bytes: length of the header | header: JSON, padded with blanks | tensor | filler | tensor | filler ...

The workers of a machine map the same file, so its pages are in memory once. The format allows no gaps between
tensors: where one would be, a filler tensor of that many zero bytes stands, named with a leading underscore.
"""

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64  # a cache line, and the widest vector that a kernel loads
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_TYPES: Mapping[str, Any] = {"U8": np.uint8, "F32": np.float32}


def write_tensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Arrays of uint8 and float32, by name. Written beside `path` and renamed, so that it is whole or not there."""
    names = {np.dtype(kind): name for name, kind in _TYPES.items()}
    header: dict[str, Any] = {}
    parts: list[npt.NDArray[Any]] = []
    offset = 0

    def add(name: str, array: npt.NDArray[Any]) -> None:
        nonlocal offset
        end = offset + array.nbytes
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        parts.append(np.ascontiguousarray(array))
        offset = end

    for name, array in tensors.items():
        add(name, array)
        if missing := -offset % ALIGNMENT:
            add(f"_filler.{name}", np.zeros(missing, dtype=np.uint8))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT)
    unfinished = path.with_suffix(".new")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for part in parts:
            file.write(part.reshape(-1).view(np.uint8).data)
    unfinished.replace(path)


def map_tensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors of such a file, by name, as read-only views of it; they keep the mapping alive.

    Raises OSError when it cannot be read, ValueError when it is damaged.
    """
    with path.open("rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    num_header_bytes = int.from_bytes(content[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + num_header_bytes
    if num_header_bytes > _MAX_HEADER_BYTES or start > len(content):
        raise ValueError(f"{path} is damaged: its header does not fit")
    header: object = json.loads(bytes(content[_LENGTH_BYTES:start]))
    tensors: dict[str, npt.NDArray[Any]] = {}
    try:
        for name, entry in cast("dict[str, Any]", header).items():
            if name.startswith("_"):
                continue
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= len(content) - start:
                raise ValueError(f"{path} is cut short")
            flat = np.frombuffer(content[start + begin : start + end], dtype=_TYPES[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"])
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is damaged: its header makes no sense") from None
    return tensors
