"""Rotary tables as transformers makes them."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shared.model.config import ModelConfig
from shared.model.rope import rotary_table


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rotary_tables_are_those_of_transformers(rope: dict[str, Any]) -> None:
    """For each kind that we support, within a rounding of the frequencies (which grows with the position)."""
    config: Any = cast("Any", LlamaConfig)(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=512, rope_parameters=dict(rope)
    )
    rotary = cast("Any", LlamaRotaryEmbedding)(config)
    expected = rotary(torch.zeros(1, 1), torch.arange(512)[None])
    ours = ModelConfig.from_hf(config.to_dict())
    tables = rotary_table(ours.rope, ours.head_dim, ours.window)
    for table, reference in zip(tables, expected, strict=True):
        both_halves = np.concatenate((table, table), axis=1)
        np.testing.assert_allclose(both_halves, reference[0].numpy(), rtol=0, atol=1e-6)
