"""A tensor file: aligned, mapped, readable by others, and refused when damaged."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from shared.model.tensor_file import ALIGNMENT, map_tensors, write_tensors

TENSORS = {
    "odd": np.arange(7, dtype=np.uint8),
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "layers.0.down": np.arange(128, dtype=np.uint8).reshape(2, 64)[:, ::-1],
}


def test_what_is_written_is_mapped(tmp_path: Path) -> None:
    """At multiples of 64 bytes in memory, read-only, with shape and type."""
    path = tmp_path / "tensors.safetensors"
    write_tensors(path, TENSORS)
    mapped = map_tensors(path)

    assert list(TENSORS) == list(mapped)
    for name, expected in TENSORS.items():
        assert np.array_equal(expected, mapped[name])
        assert (expected.dtype, 0) == (mapped[name].dtype, mapped[name].ctypes.data % ALIGNMENT)
        assert not mapped[name].flags.writeable
    assert [path] == list(tmp_path.iterdir())


def test_the_format_is_that_of_others(tmp_path: Path) -> None:
    """safetensors reads the same tensors, fillers beside them."""
    path = tmp_path / "tensors.safetensors"
    write_tensors(path, TENSORS)
    read = cast("Any", safetensors_numpy).load_file(path)

    assert sorted(TENSORS) == sorted(name for name in read if not name.startswith("_filler."))
    assert all(np.array_equal(TENSORS[name], read[name]) for name in TENSORS)


def test_damage_is_told(tmp_path: Path) -> None:
    """Cut short at any place, or a header that says nonsense: ValueError; no file: OSError."""
    path = tmp_path / "tensors.safetensors"
    write_tensors(path, TENSORS)
    whole = path.read_bytes()
    for kept in (0, 4, 100, len(whole) - 64):
        path.write_bytes(whole[:kept])
        with pytest.raises(ValueError):
            map_tensors(path)
    for header in (
        b"[]",
        b'{"a": 3}',
        json.dumps({"a": {"dtype": "F64", "shape": [0], "data_offsets": [0, 0]}}).encode(),
    ):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ValueError):
            map_tensors(path)
    with pytest.raises(OSError):
        map_tensors(tmp_path / "nothing")
