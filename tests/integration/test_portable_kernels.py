"""The cpu kernels compiled for a CPU of which nothing is known."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import kernel_products, step_digests

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.timeout(900)


def _on_any_cpu(module: str) -> Any:
    """What the module prints where AVX2, FMA and F16C are switched off. It compiles: half a minute of one core."""
    environment = dict(os.environ, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="", PYTHONPATH=str(ROOT))
    program = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,  # many times that on a busy machine
        check=True,
    )
    return json.loads(program.stdout)


def test_any_cpu_computes_the_same_bits() -> None:
    """Every mode's products, rounded rows and embeddings are the same."""
    assert kernel_products.digests() == _on_any_cpu("tests.support.kernel_products")


def test_whole_steps_have_the_same_bits_on_any_cpu() -> None:
    """Heads of 64 and 128, biases and norms of heads, every mode and type of cache: all logits and the whole cache."""
    told = _on_any_cpu("tests.support.step_digests")

    assert not told["has_avx2"]
    assert step_digests.digests() == told["digests"]
