"""Small models with random weights for the `cpu` backend, packed in memory, without a source."""

from typing import Any

import numpy as np
import numpy.typing as npt

from shared.model.config import ModelConfig, RopeConfig
from shared.model.groups import quantised
from shared.model.kernels.cpu.model import CpuModel
from shared.model.kernels.cpu.packing import pack_f32, pack_q4, pack_q8
from shared.model.numerics import NumericMode, WeightFormat

GROUPED = ModelConfig(
    num_layers=2,
    hidden_size=96,
    intermediate_size=160,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=251,
    window=512,
    rms_norm_eps=1e-5,
    has_tied_head=True,
    rope=RopeConfig(theta=10_000.0),
)
"""Three query heads on each of two key/value heads of 64, as SmolLM2; 251 tokens are no whole number of vectors."""
WIDE = ModelConfig(
    num_layers=3,
    hidden_size=64,
    intermediate_size=96,
    num_heads=5,
    num_kv_heads=1,
    head_dim=128,
    vocab_size=64,
    window=512,
    rms_norm_eps=1e-6,
    has_tied_head=False,
    rope=RopeConfig(theta=1_000_000.0),
    has_qkv_bias=True,
    has_qk_norm=True,
)
"""Five query heads on one of 128; every optional weight."""


def packed_tensors(config: ModelConfig, mode: NumericMode, seed: int = 3) -> dict[str, npt.NDArray[Any]]:
    """What a packed file would hold; the same numbers for the same seed and shape of weights."""
    random = np.random.default_rng(seed)
    scale = 0.2

    def floats(*shape: int) -> npt.NDArray[np.float32]:
        return (random.standard_normal(shape, dtype=np.float32) * np.float32(scale)).astype(np.float32)

    def matrix(rows: int, columns: int, weight_format: WeightFormat) -> npt.NDArray[np.uint8]:
        if weight_format is WeightFormat.Q4:
            codes = random.integers(0, 16, (rows, columns), dtype=np.uint8)
            d = (random.random((rows, columns // 32)) * scale / 6).astype(np.float16)
            return pack_q4(codes, d, (-8 * d.astype(np.float32)).astype(np.float16))
        values = floats(rows, columns)
        if weight_format is WeightFormat.F32:
            return pack_f32(values)
        groups = quantised(values)
        return pack_q8(groups.q, groups.d)

    body = mode.weight_format
    top = WeightFormat.F32 if body is WeightFormat.F32 else WeightFormat.Q8
    tensors: dict[str, npt.NDArray[Any]] = {}
    for layer in range(config.num_layers):
        of = f"layers.{layer}."
        tensors[of + "qkv"] = matrix(config.qkv_rows, config.hidden_size, body)
        tensors[of + "o"] = matrix(config.hidden_size, config.attention_size, body)
        tensors[of + "gate_up"] = matrix(2 * config.intermediate_size, config.hidden_size, body)
        tensors[of + "down"] = matrix(config.hidden_size, config.intermediate_size, body)
        tensors[of + "input_norm"] = 1 + floats(config.hidden_size)
        tensors[of + "post_norm"] = 1 + floats(config.hidden_size)
        if config.has_qkv_bias:
            tensors[of + "qkv_bias"] = floats(config.qkv_rows)
        if config.has_qk_norm:
            tensors[of + "q_norm"] = 1 + floats(config.head_dim)
            tensors[of + "k_norm"] = 1 + floats(config.head_dim)
    tensors["final_norm"] = 1 + floats(config.hidden_size)
    tensors["head"] = matrix(config.vocab_size, config.hidden_size, top)
    if not config.has_tied_head:
        tensors["embedding"] = matrix(config.vocab_size, config.hidden_size, top)
    return tensors


def make_model(config: ModelConfig, mode: NumericMode, *, num_threads: int = 1, max_rows: int = 128) -> CpuModel:
    """With the weights of `packed_tensors`."""
    return CpuModel(
        config,
        packed_tensors(config, mode),
        mode=mode,
        source_hash="0" * 64,
        num_threads=num_threads,
        max_rows=max_rows,
    )
