"""Quantised matrices: what they stand for, how they are made and kept."""

import numpy as np
import pytest

from shared.model.groups import Groups, quantised


def _four_bits(seed: int, rows: int = 3) -> Groups:
    random = np.random.default_rng(seed)
    d, m = (random.normal(size=(rows, 2)).astype(np.float16) for _ in range(2))
    return Groups(q=random.integers(0, 16, (rows, 64)).astype(np.uint8), d=d, m=m)


def test_a_number_is_scale_times_integer_plus_minimum() -> None:
    """Of the group that its column lies in; 8-bit groups have no minimum."""
    groups = _four_bits(1)
    values = groups.dequantised()
    assert groups.m is not None
    expected = np.float32(groups.d[2, 1]) * np.float32(groups.q[2, 40]) + np.float32(groups.m[2, 1])

    assert groups.is_4bit
    assert (np.float32, expected) == (values.dtype, values[2, 40])
    eight = Groups(q=np.full((1, 32), -3, dtype=np.int8), d=np.full((1, 1), 0.5, dtype=np.float16), m=None)
    assert [-1.5] * 32 == eight.dequantised()[0].tolist()


def test_rows_are_joined_in_order() -> None:
    """As the products of several matrices are computed as one."""
    first, second = _four_bits(1, 2), _four_bits(2, 5)
    joined = Groups.joined([first, second])

    assert np.array_equal(np.concatenate([first.dequantised(), second.dequantised()]), joined.dequantised())


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_kept_in_a_file_comes_back(bits: int) -> None:
    """4-bit integers take half a byte each."""
    groups = _four_bits(3) if bits == 4 else quantised(np.random.default_rng(4).normal(size=(3, 64)).astype(np.float32))
    tensors = groups.to_tensors("w")
    again = Groups.from_tensors(tensors, "w")

    assert groups.q.size * bits // 8 == tensors["w.q"].nbytes
    assert np.array_equal(groups.q, again.q)
    assert groups.dequantised().tobytes() == again.dequantised().tobytes()
    with pytest.raises(KeyError):
        Groups.from_tensors(tensors, "v")


def test_quantising_is_as_near_as_8_bits_are() -> None:
    """Each number within half a step of its group; zeros stay; and once more changes nothing."""
    matrix = np.random.default_rng(5).normal(size=(4, 96)).astype(np.float32)
    matrix[1, 32:64] = 0
    groups = quantised(matrix)
    step = np.repeat(groups.d.astype(np.float32), 32, axis=1)

    assert (np.abs(groups.dequantised() - matrix) <= 0.51 * step + 1e-3 * np.abs(matrix)).all()
    assert not groups.dequantised()[1, 32:64].any()
    assert np.array_equal(groups.q, quantised(groups.dequantised()).q)


def test_numbers_beyond_a_float16_scale_are_refused() -> None:
    """Instead of a scale that is infinite."""
    with pytest.raises(ValueError, match="beyond the range"):
        quantised(np.full((1, 32), 1e8, dtype=np.float32))
