"""Products with float32 activations."""

import numpy as np
import pytest

from shared.model.kernels.cpu.linear import F32, Q4F32, Q8F32
from shared.model.kernels.cpu.packing import pack_f32
from tests.support.kernel_products import Weights, fused, make_rows, make_weights, multiply, prepare_rows


def _as_float32(weights: Weights) -> Weights:
    """The same matrix as plain float32."""
    return Weights(
        codes=weights.codes,
        scales=weights.scales,
        minima=weights.minima,
        packed=pack_f32(weights.values),
        values=weights.values,
    )


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_a_product_is_its_definition(num_rows: int) -> None:
    """Bit by bit: k in order, each step one fused operation of the C library."""
    weights, rows = make_weights(F32, 16, 64), make_rows(num_rows, 64)
    expected = np.zeros((num_rows, 16), np.float32)
    for k in range(64):
        expected = fused(weights.values[None, :, k], rows[:, k, None], expected)
    np.testing.assert_array_equal(expected, multiply(F32, weights, prepare_rows(F32, rows)))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 6, 40])
@pytest.mark.parametrize("mode", [Q4F32, Q8F32])
def test_quantised_weights_give_the_bits_of_their_float32_numbers(mode: int, num_rows: int) -> None:
    """The product with packed 4-bit or 8-bit weights is the product with the matrix that they stand for."""
    weights, rows = make_weights(mode, 96, 192), make_rows(num_rows, 192)
    expected = multiply(F32, _as_float32(weights), prepare_rows(F32, rows))
    np.testing.assert_array_equal(expected, multiply(mode, weights, prepare_rows(mode, rows)))


@pytest.mark.parametrize("mode", [F32, Q4F32, Q8F32])
def test_sums_are_as_good_as_float32_is(mode: int) -> None:
    """Against float64, relative to the size of a row's outputs."""
    weights, rows = make_weights(mode, 64, 576), make_rows(9, 576)
    expected = rows.astype(np.float64) @ weights.values.T.astype(np.float64)
    actual = multiply(mode, weights, prepare_rows(mode, rows))
    assert (np.abs(actual - expected) / np.abs(expected).max(axis=1, keepdims=True)).max() < 2e-6
