"""What holds for the products of every mode: a row's bits depend on the row alone."""

import numpy as np
import pytest

from tests.support.kernel_products import MODES, make_rows, make_weights, multiply, prepare_rows

ROW_COUNTS = (*range(1, 18), 33, 63, 64, 65, 131)
NUM_OUTPUTS, K = 40, 96

all_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


@all_modes
def test_a_row_has_the_bits_that_it_has_alone(mode: int) -> None:
    """For each number of rows, at each place in the batch, rows in another order."""
    weights = make_weights(mode, NUM_OUTPUTS, K)
    activations = prepare_rows(mode, make_rows(max(ROW_COUNTS), K))
    alone = np.concatenate([multiply(mode, weights, activations.take([row])) for row in range(max(ROW_COUNTS))])
    for count in ROW_COUNTS:
        order = np.random.default_rng(count).permutation(max(ROW_COUNTS))[:count].tolist()
        np.testing.assert_array_equal(alone[order], multiply(mode, weights, activations.take(order)))


@all_modes
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_ranges_of_outputs_give_the_bits_of_the_whole(mode: int, num_rows: int) -> None:
    """Each range writes its outputs alone, whatever thread does it."""
    weights = make_weights(mode, NUM_OUTPUTS, K)
    activations = prepare_rows(mode, make_rows(num_rows, K))
    expected = multiply(mode, weights, activations)
    out = np.full_like(expected, -3.0)
    multiply(mode, weights, activations, out=out, outputs=(16, 32))
    np.testing.assert_array_equal(expected[:, 16:32], out[:, 16:32])
    assert [-3.0] == np.unique(np.delete(out, np.s_[16:32], axis=1)).tolist()
    multiply(mode, weights, activations, out=out, outputs=(32, 48))
    multiply(mode, weights, activations, out=out, outputs=(0, 16))
    np.testing.assert_array_equal(expected, out)


@all_modes
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_accumulating_adds_the_finished_sum(mode: int, num_rows: int) -> None:
    """What is there, plus the product, one rounding."""
    weights = make_weights(mode, NUM_OUTPUTS, K)
    activations = prepare_rows(mode, make_rows(num_rows, K))
    product = multiply(mode, weights, activations)
    before = np.random.default_rng(3).standard_normal(product.shape).astype(np.float32)
    actual = multiply(mode, weights, activations, out=before.copy(), accumulate=True)
    np.testing.assert_array_equal(before + product, actual)


@all_modes
@pytest.mark.parametrize("num_rows", [0, 1, 2, 4, 5])
def test_rows_beyond_the_count_are_not_touched(mode: int, num_rows: int) -> None:
    """Memory of a larger batch behind them stays as it is; no row at all is no work."""
    weights = make_weights(mode, NUM_OUTPUTS, K)
    activations = prepare_rows(mode, make_rows(6, K))
    out = np.full((6, 48), 5.0, np.float32)
    multiply(mode, weights, activations, out=out, num_rows=num_rows)
    assert [5.0] == np.unique(out[num_rows:]).tolist()
    assert (out[:num_rows] != 5.0).all() or num_rows == 0


@all_modes
def test_padded_outputs_are_zero(mode: int) -> None:
    """Outputs that the matrix does not have come from zero weights."""
    activations = prepare_rows(mode, make_rows(3, K))
    assert not multiply(mode, make_weights(mode, NUM_OUTPUTS, K), activations)[:, NUM_OUTPUTS:].any()
