"""The rotation of a head against complex numbers in float64."""

import numpy as np

from shared.model.kernels.cpu.rope import rotate_head
from tests.support.compiled_calls import call


def test_a_head_is_turned_and_scaled() -> None:
    """Numbers i and i + 16 of a head of 32 are the parts of one complex number."""
    random = np.random.default_rng(1)
    head = random.standard_normal(32, dtype=np.float32)
    angles = random.random(16) * 6
    turned = (head[:16] + 1j * head[16:].astype(np.float64)) * np.exp(1j * angles) * 0.125
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    call(rotate_head, head, cosines, sines, head, 2, 0.125)
    np.testing.assert_allclose(np.concatenate([turned.real, turned.imag]), head, atol=1e-6)
