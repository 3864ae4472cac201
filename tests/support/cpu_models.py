"""Small models with random weights for the `cpu` backend, packed in memory, without a source."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.model.config import ModelConfig, RopeConfig
from shared.model.groups import quantised
from shared.model.kernels.cpu.model import CpuModel
from shared.model.kernels.cpu.packing import pack_f32, pack_q4, pack_q8, unpack_f32
from shared.model.numerics import NumericMode, WeightFormat
from shared.model.rope import rotary_table

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


def exact_logits(
    config: ModelConfig, tensors: dict[str, npt.NDArray[Any]], ids: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Logits [tokens, vocabulary] of a float32 model by its formulas, in float64, over whole sequences."""
    cosines, sines = (table[: len(ids), None].astype(np.float64) for table in _angles(config))
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim

    def weights(name: str, rows: int) -> npt.NDArray[np.float64]:
        return unpack_f32(tensors[name], rows).astype(np.float64)

    def norm(x: npt.NDArray[np.float64], weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight

    def turn(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        low, high = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=-1)

    hidden_from = tensors.get("embedding", tensors["head"])
    x = unpack_f32(hidden_from, config.vocab_size).astype(np.float64)[list(ids)]
    future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for layer in range(config.num_layers):
        of = f"layers.{layer}."
        qkv = norm(x, tensors[of + "input_norm"]) @ weights(of + "qkv", config.qkv_rows).T
        qkv = (qkv + tensors.get(of + "qkv_bias", np.zeros(1))).reshape(len(ids), -1, size)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if config.has_qk_norm:
            q, k = norm(q, tensors[of + "q_norm"]), norm(k, tensors[of + "k_norm"])
        k, v = (np.repeat(each, heads // kv_heads, axis=1) for each in (turn(k), v))
        scores = np.einsum("qhd,khd->hqk", turn(q), k) * size**-0.5 + future
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, v).reshape(len(ids), -1)
        x = x + mixed @ weights(of + "o", config.hidden_size).T
        both = norm(x, tensors[of + "post_norm"]) @ weights(of + "gate_up", 2 * config.intermediate_size).T
        gate, up = both[:, : config.intermediate_size], both[:, config.intermediate_size :]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights(of + "down", config.hidden_size).T
    return norm(x, tensors["final_norm"]) @ weights("head", config.vocab_size).T


def _angles(config: ModelConfig) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    return rotary_table(config.rope, config.head_dim, config.window)
