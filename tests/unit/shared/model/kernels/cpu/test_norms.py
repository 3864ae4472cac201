"""The norm of a row against its formula in float64."""

import numpy as np

from shared.model.kernels.cpu.norms import rms_norm
from tests.support.compiled_calls import call


def test_norm_is_its_formula_and_may_be_in_place() -> None:
    """72 numbers, no power of two; the weight is applied after the division by the root of the mean."""
    random = np.random.default_rng(1)
    x = random.standard_normal(72, dtype=np.float32)
    weight = random.standard_normal(72, dtype=np.float32)
    expected = x / np.sqrt(np.mean(x.astype(np.float64) ** 2) + 0.01) * weight
    out = np.zeros(72, dtype=np.float32)
    call(rms_norm, x, weight, out, 9, 1 / 72, 0.01)
    np.testing.assert_allclose(expected, out, rtol=1e-6)
    call(rms_norm, x, weight, x, 9, 1 / 72, 0.01)
    assert out.tobytes() == x.tobytes()
