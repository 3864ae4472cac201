"""The gated SiLU and the bias against numpy."""

import numpy as np

from shared.model.kernels.cpu.activation import add_to, silu_times
from tests.support.compiled_calls import call


def test_silu_is_its_formula() -> None:
    """Over the whole range of float32 exponentials, far beyond it too, and in place."""
    gate = np.array([-1e4, -100, -88, -20, -1, -1e-6, 0, 1e-6, 1, 20, 88, 100, 1e4, 0.5, -0.5, 3], dtype=np.float32)
    up = np.linspace(-2, 2, 16, dtype=np.float32)
    exact = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = exact / (1 + np.exp(-exact)) * up
    call(silu_times, gate, up, gate, 2)
    np.testing.assert_allclose(expected, gate, rtol=2e-6, atol=1e-30)


def test_a_bias_is_added() -> None:
    """Number by number, in place."""
    x, summand = np.random.default_rng(1).standard_normal((2, 24), dtype=np.float32)
    expected = x + summand
    call(add_to, x, summand, 3)
    assert expected.tobytes() == x.tobytes()
