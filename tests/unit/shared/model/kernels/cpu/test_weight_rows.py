"""Rows of packed weights as embeddings."""

import numpy as np
import pytest

from shared.model.kernels.cpu.linear import F32, Q8F32
from tests.support.kernel_products import make_weights, read_row


@pytest.mark.parametrize("mode", [F32, Q8F32])
@pytest.mark.parametrize("row", [0, 7, 8, 17, 39])
def test_a_row_is_what_was_packed(mode: int, row: int) -> None:
    """Bit by bit the float32 numbers that the packed row stands for."""
    weights = make_weights(mode, 40, 96)
    np.testing.assert_array_equal(weights.values[row], read_row(mode, weights, row))
