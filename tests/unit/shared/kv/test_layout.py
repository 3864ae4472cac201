"""Tests of `shared.kv.layout`."""

import dataclasses

import numpy as np
import pytest

from shared.kv.layout import KvLayout

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", block_size=16, numerics=b"n")


def test_byte_counts_follow_from_the_shape() -> None:
    """K and V of 2 heads of 8 floats: 128 bytes a token and layer."""
    expected = (128, 3 * 128, 16 * 128, 3 * 16 * 128)

    assert expected == (LAYOUT.layer_token_bytes, LAYOUT.token_bytes, LAYOUT.layer_block_bytes, LAYOUT.block_bytes)


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2), (1_000_000, 62_500)])
def test_num_blocks_for_rounds_up(num_tokens: int, expected: int) -> None:
    """A block that is begun is needed whole."""
    assert expected == LAYOUT.num_blocks_for(num_tokens)


@pytest.mark.parametrize(
    ("dtype", "storage", "itemsize"),
    [("float32", np.float32, 4), ("float16", np.float16, 2), ("bfloat16", np.uint16, 2), ("uint64", np.uint64, 8)],
)
def test_storage_follows_from_the_dtype(dtype: str, storage: type, itemsize: int) -> None:
    """Numbers that numpy does not know are kept as the bits that they are."""
    layout = dataclasses.replace(LAYOUT, dtype=dtype)

    assert (np.dtype(storage), itemsize) == (layout.storage_dtype, layout.itemsize)
    assert 3 * 2 * 2 * 8 * itemsize == layout.token_bytes


def test_fingerprint_tells_every_field_apart() -> None:
    """Equal layouts have equal fingerprints, and a change of any one field changes it."""
    others = [
        dataclasses.replace(LAYOUT, num_layers=4),
        dataclasses.replace(LAYOUT, num_kv_heads=3),
        dataclasses.replace(LAYOUT, head_dim=4),
        dataclasses.replace(LAYOUT, dtype="int32"),
        dataclasses.replace(LAYOUT, dtype="bfloat16"),
        dataclasses.replace(LAYOUT, dtype="uint16"),
        dataclasses.replace(LAYOUT, block_size=8),
        dataclasses.replace(LAYOUT, numerics=b"m"),
    ]

    assert LAYOUT.fingerprint == dataclasses.replace(LAYOUT).fingerprint
    assert 9 == len({LAYOUT.fingerprint, *(other.fingerprint for other in others)})


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_a_size_of_zero_is_refused(field: str) -> None:
    """A layout without layers, heads, width or slots names the field that is wrong."""
    fields: dict[str, int] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "block_size": 1, field: 0}

    with pytest.raises(ValueError, match=field):
        KvLayout(dtype="float32", numerics=b"", **fields)


@pytest.mark.parametrize("dtype", ["float33", "object", "V0"])
def test_an_unknown_dtype_is_refused(dtype: str) -> None:
    """The dtype must be a numpy name of numbers with bytes, or bfloat16."""
    with pytest.raises(ValueError, match=dtype):
        dataclasses.replace(LAYOUT, dtype=dtype)
