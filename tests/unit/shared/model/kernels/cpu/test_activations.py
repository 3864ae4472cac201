"""Rounding of activations to integers."""

import numpy as np
import pytest

from shared.model.kernels.cpu.linear import Q4A8, Q4A16
from tests.support.kernel_products import make_rows, prepare_rows


@pytest.mark.parametrize(("mode", "limit"), [(Q4A16, 32767), (Q4A8, 127)])
def test_a_group_is_rounded_by_its_largest(mode: int, limit: int) -> None:
    """Integers, scale and scaled sum, bit by bit, by the same arithmetic in numpy; the largest reaches the limit."""
    rows = make_rows(3, 160)
    groups = rows.reshape(3, 5, 32)
    largest = np.abs(groups).max(axis=2)
    integers = np.rint(groups * (np.float32(limit) / largest)[:, :, None]).astype(np.int64)
    scale = largest / np.float32(limit)
    actual = prepare_rows(mode, rows)
    np.testing.assert_array_equal(integers.reshape(3, 160), actual.q)
    np.testing.assert_array_equal(scale, actual.scale)
    np.testing.assert_array_equal(scale * integers.sum(axis=2).astype(np.float32), actual.sums)
    assert [limit] == np.unique(np.abs(integers).max(axis=2)).tolist()


@pytest.mark.parametrize("mode", [Q4A16, Q4A8])
def test_zeros_stay_zeros(mode: int) -> None:
    """A group without any size has a finite scale, so products with it are zero."""
    actual = prepare_rows(mode, np.zeros((1, 32), np.float32))
    assert not actual.q.any()
    assert np.isfinite(actual.scale).all()
    assert [[0.0]] == actual.sums.tolist()


@pytest.mark.parametrize("mode", [Q4A16, Q4A8])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_its_group_alone(mode: int, broken: float) -> None:
    """Scale and sum are "not a number" there, and as ever in the groups beside it."""
    rows = make_rows(1, 96)
    clean = prepare_rows(mode, rows.copy())
    rows[0, 40] = broken
    actual = prepare_rows(mode, rows)
    assert [False, True, False] == np.isnan(actual.scale[0]).tolist()
    assert [False, True, False] == np.isnan(actual.sums[0]).tolist()
    np.testing.assert_array_equal(clean.q[:, 64:], actual.q[:, 64:])
