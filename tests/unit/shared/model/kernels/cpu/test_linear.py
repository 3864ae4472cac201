"""Products by mode, from compiled code, on any thread (the choice at the call: test_vectors, and every model step)."""

import threading
from typing import Any

import numpy as np
import pytest

from shared.model.kernels.cpu.linear import HEAD_MODES, Q4A16, Q8A16, Q8F32
from tests.support.kernel_products import MODES, linear, make_rows, make_weights, multiply, prepare_rows


def test_a_constant_mode_compiles_its_kernel_alone() -> None:
    """What a deployment does not use costs it no compilation."""
    multiply(Q4A16, make_weights(Q4A16, 16, 32), prepare_rows(Q4A16, make_rows(1, 32)))
    compiled: Any = linear(Q4A16)
    code = next(iter(compiled.inspect_llvm().values()))
    assert "firsttoken_linear_q4a16" in code
    assert "firsttoken_linear_q4a8" not in code


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_no_operation_may_be_reordered(mode: int) -> None:
    """No fast-math flag stands in the code of any product: LLVM keeps each sum's order, and fuses nothing itself."""
    multiply(mode, make_weights(mode, 16, 32), prepare_rows(mode, make_rows(1, 32)))
    compiled: Any = linear(mode)
    code = next(iter(compiled.inspect_llvm().values()))
    lines = [line for line in code.splitlines() if " fmul " in line or " fadd " in line or "@llvm.fma" in line]
    assert len(lines) > 20
    flags = {"fast", "reassoc", "contract", "nnan", "ninf", "nsz", "arcp", "afn"}
    assert [] == [line for line in lines if flags & set(line.split())]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_threads_change_no_bit(mode: int) -> None:
    """Four threads at once, each on its range of outputs, without the interpreter's lock."""
    weights, activations = make_weights(mode, 256, 96), prepare_rows(mode, make_rows(9, 96))
    expected = multiply(mode, weights, activations)
    out = np.zeros_like(expected)
    threads = [
        threading.Thread(
            target=multiply,
            args=(mode, weights, activations),
            kwargs={"out": out, "outputs": (64 * each, 64 * each + 64)},
        )
        for each in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(expected, out)


def test_heads_have_no_eight_bit_activations() -> None:
    """Each mode that a body may have has a head of 8-bit or float32 weights."""
    assert {0, 1, 2, 3, 4} == set(HEAD_MODES)
    assert {0: 0, 1: Q8F32, 2: Q8A16, 3: Q8A16, 4: Q8A16} == HEAD_MODES
