"""The memory of packed weights."""

import numpy as np
import pytest

from shared.model.kernels.cpu import packing

RANDOM = np.random.default_rng(7)


def test_four_bits_lie_where_the_map_says() -> None:
    """Each code, d and m of a matrix of 24 outputs is found by the map's own arithmetic; the rest is zero."""
    codes = RANDOM.integers(0, 16, (24, 64), dtype=np.uint8)
    scales, minima = (RANDOM.standard_normal((24, 2)).astype(np.float16) for _ in range(2))
    packed = packing.pack_q4(codes, scales, minima)
    assert (2, 2 * 2 * 160) == packed.shape
    groups = packed.reshape(4, 2, 160)
    for output in range(24):
        block, lane = divmod(output, 8)
        for k in range(64):
            group = groups[block, k // 32]
            assert scales[output, k // 32] == group[:16].view(np.float16)[lane]
            assert minima[output, k // 32] == group[16:32].view(np.float16)[lane]
            byte = group[32 + 32 * (k % 32 // 8) + 4 * lane + k % 4]
            assert codes[output, k] == (byte >> 4 if k % 8 >= 4 else byte & 15)
    assert not groups[3].any()


def test_eight_bits_lie_where_the_map_says() -> None:
    """Each code and d of a matrix of 24 outputs is found by the map's own arithmetic; the rest is zero."""
    codes = RANDOM.integers(-127, 128, (24, 64)).astype(np.int8)
    scales = RANDOM.standard_normal((24, 2)).astype(np.float16)
    packed = packing.pack_q8(codes, scales)
    assert (2, 2 * 2 * 272) == packed.shape
    groups = packed.reshape(4, 2, 272)
    for output in range(24):
        block, lane = divmod(output, 8)
        for group in range(2):
            assert scales[output, group] == groups[block, group, :16].view(np.float16)[lane]
            for eight in range(4):
                for number, pair in enumerate(((0, 2), (4, 6), (1, 3), (5, 7))):
                    for half, k in enumerate(pair):
                        byte = groups[block, group, 16 + 16 * (4 * eight + number) + 2 * lane + half]
                        assert codes[output, 32 * group + 8 * eight + k] == byte.view(np.int8)
    assert not groups[3].any()


def test_float32_lies_where_the_map_says() -> None:
    """Units of 16 outputs, outputs innermost; missing outputs are zero."""
    weights = RANDOM.standard_normal((17, 32)).astype(np.float32)
    packed = packing.pack_f32(weights).view(np.float32).reshape(2, 32, 16)
    assert (weights[:16].T == packed[0]).all()
    assert (weights[16] == packed[1, :, 0]).all()
    assert not packed[1, :, 1:].any()


@pytest.mark.parametrize("num_outputs", [1, 8, 16, 40])
def test_unpacking_gives_what_was_packed(num_outputs: int) -> None:
    """All three formats, with and without padding."""
    codes = RANDOM.integers(0, 16, (num_outputs, 96), dtype=np.uint8)
    scales, minima = (RANDOM.standard_normal((num_outputs, 3)).astype(np.float16) for _ in range(2))
    for expected, actual in zip(
        (codes, scales, minima),
        packing.unpack_q4(packing.pack_q4(codes, scales, minima), num_outputs),
        strict=True,
    ):
        np.testing.assert_array_equal(expected, actual)
    signed = RANDOM.integers(-127, 128, (num_outputs, 96)).astype(np.int8)
    actual_codes, actual_scales = packing.unpack_q8(packing.pack_q8(signed, scales), num_outputs)
    np.testing.assert_array_equal(signed, actual_codes)
    np.testing.assert_array_equal(scales, actual_scales)
    weights = RANDOM.standard_normal((num_outputs, 96)).astype(np.float32)
    np.testing.assert_array_equal(weights, packing.unpack_f32(packing.pack_f32(weights), num_outputs))


def test_outputs_are_padded_to_units() -> None:
    """Whole units of 16."""
    assert [16, 16, 32, 960] == [packing.padded_outputs(outputs) for outputs in (1, 16, 17, 960)]


def test_what_cannot_be_packed_is_refused() -> None:
    """Codes above four bits, scales that are not finite, a k without whole groups."""
    scales = np.ones((1, 1), np.float16)
    with pytest.raises(ValueError, match="above 15"):
        packing.pack_q4(np.full((1, 32), 16, np.uint8), scales, scales)
    for broken in (np.inf, np.nan):
        bad = np.full((1, 1), broken, np.float16)
        with pytest.raises(ValueError, match="not finite"):
            packing.pack_q4(np.zeros((1, 32), np.uint8), scales, bad)
        with pytest.raises(ValueError, match="not finite"):
            packing.pack_q8(np.zeros((1, 32), np.int8), bad)
    with pytest.raises(ValueError, match="whole groups"):
        packing.pack_f32(np.zeros((1, 40), np.float32))
