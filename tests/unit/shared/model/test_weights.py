"""Which weights a model must have."""

import pytest

from shared.model.config import ModelConfig, RopeConfig
from shared.model.prepared import PreparationError
from shared.model.weights import EMBEDDING, HEAD, check_weights, expected_shapes, head_name


def _config(*, is_tied: bool = True, has_qkv_bias: bool = False, has_qk_norm: bool = False) -> ModelConfig:
    return ModelConfig(
        num_layers=1,
        hidden_size=32,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=10,
        window=8,
        rms_norm_eps=1e-5,
        has_tied_head=is_tied,
        rope=RopeConfig(theta=1e4),
        has_qkv_bias=has_qkv_bias,
        has_qk_norm=has_qk_norm,
    )


def test_shapes_follow_from_the_config() -> None:
    """Rows are outputs; heads may be wider than the model."""
    assert {
        "model.embed_tokens.weight": (10, 32),
        "model.norm.weight": (32,),
        "model.layers.0.input_layernorm.weight": (32,),
        "model.layers.0.post_attention_layernorm.weight": (32,),
        "model.layers.0.self_attn.q_proj.weight": (64, 32),
        "model.layers.0.self_attn.k_proj.weight": (32, 32),
        "model.layers.0.self_attn.v_proj.weight": (32, 32),
        "model.layers.0.self_attn.o_proj.weight": (32, 64),
        "model.layers.0.mlp.gate_proj.weight": (96, 32),
        "model.layers.0.mlp.up_proj.weight": (96, 32),
        "model.layers.0.mlp.down_proj.weight": (32, 96),
    } == expected_shapes(_config())


def test_families_have_more() -> None:
    """A head of its own, biases of q, k and v, norms of heads."""
    plain = expected_shapes(_config())
    more = expected_shapes(_config(is_tied=False, has_qkv_bias=True, has_qk_norm=True))

    assert {
        "lm_head.weight": (10, 32),
        "model.layers.0.self_attn.q_proj.bias": (64,),
        "model.layers.0.self_attn.k_proj.bias": (32,),
        "model.layers.0.self_attn.v_proj.bias": (32,),
        "model.layers.0.self_attn.q_norm.weight": (16,),
        "model.layers.0.self_attn.k_norm.weight": (16,),
    } == {name: shape for name, shape in more.items() if name not in plain}
    assert (EMBEDDING, HEAD) == (head_name(_config()), head_name(_config(is_tied=False)))


def test_what_does_not_fit_is_named() -> None:
    """Missing, of another shape, or one too many; a copy of the embedding beside a tied head is no harm."""
    shapes = expected_shapes(_config())
    norm = "model.norm.weight"
    check_weights(_config(), shapes)
    check_weights(_config(), shapes | {HEAD: (10, 32)})
    for found, part in (
        ({name: shape for name, shape in shapes.items() if name != norm}, f"{norm} is missing"),
        (shapes | {norm: (33,)}, rf"{norm} has the shape \[33\], the config says \[32\]"),
        (shapes | {"model.layers.0.self_attn.q_proj.bias": (64,)}, "q_proj.bias is none that"),
    ):
        with pytest.raises(PreparationError, match=part):
            check_weights(_config(), found)
