"""Bits of whole steps of small models: `python -m tests.support.step_digests` prints them, for other CPUs to compare."""

import hashlib
import json

import numpy as np

from shared.kv.memory import KvMemory
from shared.model.kernels.cpu.vectors import has_avx2
from shared.model.model import Segment
from shared.model.numerics import NumericMode
from tests.support.cpu_models import GROUPED, WIDE, make_model

KINDS = (
    *((mode, "float32") for mode in NumericMode if mode is not NumericMode.BF16),
    (NumericMode.F32, "float16"),
    (NumericMode.Q4A16, "bfloat16"),
)
CHUNKS = ((0, 70), (70, 83), (83, 84), (84, 85))  # a prompt beyond a tile of keys, then steps of one row


def digests() -> dict[str, str]:
    """By model, mode and type of cache: of all logits and of the whole cache."""
    found: dict[str, str] = {}
    for name, config in (("grouped", GROUPED), ("wide", WIDE)):
        ids: list[int] = np.random.default_rng(1).integers(0, config.vocab_size, CHUNKS[-1][1]).tolist()
        for mode, kv_dtype in KINDS:
            model = make_model(config, mode)
            memory = KvMemory(model.layout(16, kv_dtype), 6)
            digest = hashlib.blake2b()
            for start, end in CHUNKS:
                segment = Segment(
                    token_ids=ids[start:end], start=start, block_table=np.arange(6)[::-1], want_logits=True
                )
                digest.update(model.forward(memory, [segment]).tobytes())
            digest.update(memory.data.tobytes())
            found[f"{name} {mode} {kv_dtype}"] = digest.hexdigest()
            model.close()
    return found


if __name__ == "__main__":
    print(json.dumps({"has_avx2": has_avx2(), "digests": digests()}))
