"""The cpu kernels compiled for a CPU of which nothing is known."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernel_products import digests

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.timeout(600)
def test_any_cpu_computes_the_same_bits() -> None:
    """With AVX2, FMA and F16C switched off every mode's products, rounded rows and embeddings are the same."""
    environment = dict(os.environ, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="", PYTHONPATH=str(ROOT))
    program = subprocess.run(
        [sys.executable, "-m", "tests.support.kernel_products"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,  # six compilations, ten seconds on an idle machine
        check=True,
    )
    assert digests() == json.loads(program.stdout)
