"""Products of quantised weights and quantised activations."""

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.model.kernels.cpu.linear import Q4A8, Q4A16, Q8A16
from shared.model.kernels.cpu.packing import pack_q4, pack_q8
from tests.support.kernel_products import (
    INTEGER_MODES,
    Activations,
    Weights,
    fused,
    make_rows,
    make_weights,
    multiply,
    prepare_rows,
)


def _by_definition(weights: Weights, activations: Activations, *, has_minima: bool) -> NDArray[np.float32]:
    """Group by group: exact integers, then the fused operations that the module names."""
    total = np.zeros((activations.q.shape[0], weights.codes.shape[0]), np.float32)
    for group in range(weights.scales.shape[1]):
        part = slice(32 * group, 32 * group + 32)
        integers = (activations.q[:, part] @ weights.codes[:, part].T).astype(np.float32)
        scale, sums = activations.scale[:, group, None], activations.sums[:, group, None]
        if has_minima:
            total = fused(weights.minima[None, :, group].astype(np.float32), sums, total)
        total = fused(weights.scales[None, :, group].astype(np.float32) * scale, integers, total)
    return total


@pytest.mark.parametrize("num_rows", [1, 4, 7])
@pytest.mark.parametrize("mode", INTEGER_MODES.values(), ids=INTEGER_MODES.keys())
def test_a_product_is_its_definition(mode: int, num_rows: int) -> None:
    """Bit by bit, by exact integers in numpy and the C library's fused operation."""
    weights = make_weights(mode, 32, 96)
    activations = prepare_rows(mode, make_rows(num_rows, 96))
    expected = _by_definition(weights, activations, has_minima=mode != Q8A16)
    np.testing.assert_array_equal(expected, multiply(mode, weights, activations))


@pytest.mark.parametrize("mode", INTEGER_MODES.values(), ids=INTEGER_MODES.keys())
def test_the_largest_integers_do_not_overflow(mode: int) -> None:
    """Every weight and every activation at its limit: the sums that 16 and 32 bits must hold."""
    weights = make_weights(mode, 16, 64)
    limit = 127 if mode == Q8A16 else 15
    weights.codes[:] = limit
    rows = np.ones((6, 64), np.float32)
    rows[1] = -1
    packed = _packed(mode, weights)
    activations = prepare_rows(mode, rows)
    expected = _by_definition(packed, activations, has_minima=mode != Q8A16)
    np.testing.assert_array_equal(expected, multiply(mode, packed, activations))


def _packed(mode: int, weights: Weights) -> Weights:
    if mode == Q8A16:
        packed = pack_q8(weights.codes.astype(np.int8), weights.scales)
    else:
        packed = pack_q4(weights.codes.astype(np.uint8), weights.scales, weights.minima)
    return Weights(
        codes=weights.codes, scales=weights.scales, minima=weights.minima, packed=packed, values=weights.values
    )


@pytest.mark.parametrize(("mode", "tolerance"), [(Q4A16, 1e-4), (Q8A16, 1e-4), (Q4A8, 2e-2)])
def test_rounding_activations_costs_little(mode: int, tolerance: float) -> None:
    """Against float64 with the activations as they were: errors relative to the size of a row's outputs."""
    weights, rows = make_weights(mode, 64, 576), make_rows(9, 576)
    expected = rows.astype(np.float64) @ weights.values.T.astype(np.float64)
    actual = multiply(mode, weights, prepare_rows(mode, rows))
    size = np.abs(expected).max(axis=1, keepdims=True)
    assert (np.abs(actual - expected) / size).max() < tolerance


@pytest.mark.parametrize("num_rows", [1, 3, 6])
@pytest.mark.parametrize("mode", INTEGER_MODES.values(), ids=INTEGER_MODES.keys())
def test_what_is_not_finite_is_not_hidden(mode: int, num_rows: int) -> None:
    """One infinity among a row's activations makes all its outputs "not a number", and no other row's."""
    rows = make_rows(num_rows, 96)
    rows[0, 50] = np.inf
    actual = multiply(mode, make_weights(mode, 16, 96), prepare_rows(mode, rows))
    assert np.isnan(actual[0]).all()
    assert np.isfinite(actual[1:]).all()
