"""Products that give a row the same bits in any batch, and rotary tables as transformers makes them."""

from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shared.model.config import ModelConfig, RopeConfig
from shared.model.layers import Linear, PackedLinear, PaddedLinear, rotary_table
from shared.model.prepared import PreparationError


@pytest.mark.parametrize(
    ("kind", "num_out", "num_in"), [(PackedLinear, 576, 1536), (PackedLinear, 960, 576), (PaddedLinear, 960, 576)]
)
def test_a_row_s_product_does_not_depend_on_the_batch(kind: type[Any], num_out: int, num_in: int) -> None:
    """Small and larger batches, at either end of the batch, on one thread and on two."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(num_out, num_in, generator=generator) * 0.02
    rows = torch.randn(64, num_in, generator=generator)
    multiply: Linear = kind(weight)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = multiply(rows)
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for size in (1, 2, 3, 5, 6, 7, 9, 10, 11, 12, 17, 33, 64):
                assert torch.equal(multiply(rows[:size]), expected[:size]), size
                assert torch.equal(multiply(rows[-size:].contiguous()), expected[-size:]), size
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(expected, rows @ weight.T, rtol=1e-4, atol=1e-4)


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
    """For each kind that we support, to the last bit."""
    config: Any = cast("Any", LlamaConfig)(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=512, rope_parameters=dict(rope)
    )
    rotary = cast("Any", LlamaRotaryEmbedding)(config)
    expected = rotary(torch.zeros(1, 1), torch.arange(512)[None])
    ours = ModelConfig.from_hf(config.to_dict())
    tables = rotary_table(ours.rope, ours.head_dim, ours.window)
    for table, reference in zip(tables, expected, strict=True):
        torch.testing.assert_close(table, reference[0], rtol=0, atol=1e-6)


def test_older_configs_say_the_same() -> None:
    """A base and a scaling at the top level."""
    fields = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 10,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    config = ModelConfig.from_hf(fields)
    assert (config.rope, config.num_kv_heads, config.head_dim) == (
        RopeConfig(theta=500.0, kind="linear", factor=2.0),
        4,
        16,
    )
    for change, part in (
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"vocab_size": "many"}, "wrong value"),
    ):
        with pytest.raises(PreparationError, match=part):
            ModelConfig.from_hf(fields | change)
    del fields["rms_norm_eps"]
    with pytest.raises(PreparationError, match="has no rms_norm_eps"):
        ModelConfig.from_hf(fields)
