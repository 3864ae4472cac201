"""A model's numbers from its config.json, or a sentence that says why not."""

from typing import Any

import pytest

from shared.model.config import ModelConfig
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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported: llama"),
        ({"model_type": None}, "None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"hidden_size": "wide"}, "wrong value"),
    ],
)
def test_another_architecture_is_refused_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    """Instead of wrong text from a model that is nearly right."""
    with pytest.raises(PreparationError) as caught:
        ModelConfig.from_hf(_fields(**changes))

    assert sentence in str(caught.value)
