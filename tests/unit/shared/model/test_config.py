"""A model's numbers from its config.json, or a sentence that says why not."""

from typing import Any

import pytest

from shared.model.config import ModelConfig, RopeConfig
from shared.model.prepared import PreparationError


def _fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 100_000.0,
    }
    return {name: value for name, value in {**fields, **changes}.items() if value is not None}


def test_the_numbers_of_the_default_model() -> None:
    """Head size follows from the others where it is not given."""
    config = ModelConfig.from_hf(_fields())

    assert (30, 9, 3, 64) == (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    assert (8192, 49152) == (config.window, config.vocab_size)
    assert config.has_tied_head
    assert (100_000.0, "default") == (config.rope.theta, config.rope.kind)


def test_without_grouped_heads_every_head_has_its_keys() -> None:
    """Older configs do not name the number of KV heads."""
    assert 9 == ModelConfig.from_hf(_fields(num_key_value_heads=None)).num_kv_heads


def test_families_differ_in_biases_and_norms() -> None:
    """Qwen2 has biases on q, k and v whatever its config says of them; Qwen3 norms each head."""
    configs = [ModelConfig.from_hf(_fields(model_type=name)) for name in ("llama", "qwen2", "qwen3")]

    assert [(False, False), (True, False), (False, True)] == [(each.has_qkv_bias, each.has_qk_norm) for each in configs]
    assert (960, 576) == (configs[0].qkv_rows, configs[0].attention_size)
    assert ModelConfig.from_hf(_fields(model_type="qwen2", attention_bias=True)).has_qkv_bias


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported: llama"),
        ({"model_type": None}, "None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "a qwen2 model with use_sliding_window = True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"num_key_value_heads": 2}, "9 heads on 2 key/value heads"),
        ({"head_dim": 63}, "head_dim is odd: 63"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"hidden_size": "wide"}, "wrong value"),
    ],
)
def test_another_architecture_is_refused_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    """Instead of wrong text from a model that is nearly right."""
    with pytest.raises(PreparationError) as caught:
        ModelConfig.from_hf(_fields(**changes))

    assert sentence in str(caught.value)


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
