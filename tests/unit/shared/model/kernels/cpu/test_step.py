"""The numbers of a whole step, attention over more than one segment of keys included, against float64."""

import numpy as np
import pytest

from shared.kv.memory import KvMemory
from shared.model.config import ModelConfig
from shared.model.kernels.cpu.attention import SEGMENT_KEYS
from shared.model.model import Segment
from shared.model.numerics import NumericMode
from tests.support.cpu_models import GROUPED, WIDE, exact_logits, make_model, packed_tensors

pytestmark = pytest.mark.timeout(300)  # the first run on a machine compiles the kernels


@pytest.mark.parametrize("config", [GROUPED, WIDE], ids=["grouped", "wide"])
@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("float32", 2e-5), ("float16", 2e-2), ("bfloat16", 0.15)])
def test_logits_are_those_of_the_formulas(config: ModelConfig, kv_dtype: str, tolerance: float) -> None:
    """Chunks of a prompt that ends in its second segment, then single tokens; largest difference against the spread."""
    length = 2 * SEGMENT_KEYS - 60
    ids = np.random.default_rng(4).integers(0, config.vocab_size, length).tolist()
    expected = exact_logits(config, packed_tensors(config, NumericMode.F32), ids)
    model = make_model(config, NumericMode.F32, num_threads=2)
    memory, table = KvMemory(model.layout(16, kv_dtype), 32), np.random.default_rng(5).permutation(32)
    ends = [1, 2, 30, 64, 65, 200, 256, 257, 400, *range(448, length + 1)]
    for start, end in zip([0, *ends], ends, strict=False):
        segment = Segment(token_ids=ids[start:end], start=start, block_table=table, want_logits=True)
        difference = np.abs(model.forward(memory, [segment])[0] - expected[end - 1]).max()
        assert difference < tolerance * np.std(expected)
