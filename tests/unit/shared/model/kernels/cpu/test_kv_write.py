"""Keys and values in the numbers of the cache, against numpy's and torch's own rounding."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shared.model.kernels.cpu.kv_write import KV_KINDS, write_key, write_value
from shared.model.torch_layers import as_tensor
from tests.support.compiled_calls import call

_HARD = [
    0.0,
    -0.0,
    1.0,
    65504.0,
    65519.0,
    7e4,
    -1e30,
    2.0**-24,
    2.0**-25,
    3 * 2.0**-25,
    6.1e-5,
    -6.09e-5,
    1 / 3,
    -2049.0,
]


def _numbers() -> npt.NDArray[np.float32]:
    """Borders of the types, ties and subnormal numbers among random ones: a head of 64."""
    random = np.random.default_rng(2).standard_normal(50, dtype=np.float32)
    return np.concatenate([np.array(_HARD, dtype=np.float32), random])


def _expected(numbers: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.generic]:
    if dtype == "float32":
        return numbers
    if dtype == "float16":
        return np.clip(numbers, -65504, 65504).astype(np.float16)
    return as_tensor(numbers).to(torch.bfloat16).view(torch.uint16).numpy()


@pytest.mark.parametrize("dtype", KV_KINDS)
def test_numbers_are_rounded_to_the_nearest(dtype: str) -> None:
    """Halves to even; beyond float16's range its largest number; keys with a stride, values side by side."""
    numbers = _numbers()
    expected = _expected(numbers, dtype)
    slots = np.zeros((64, 16), dtype=expected.dtype)
    before = slots.copy()
    out = np.zeros(64, dtype=expected.dtype)
    call(write_value, numbers, out, 8, number=KV_KINDS[dtype])
    call(write_key, numbers, slots[:, 5:], slots.strides[0], 8, number=KV_KINDS[dtype])
    assert expected.tobytes() == out.tobytes()
    before[:, 5] = expected
    assert before.tobytes() == slots.tobytes()
