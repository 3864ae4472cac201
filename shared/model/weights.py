"""Which weights a model has, by their Hugging Face names, with the shape of each."""

from collections.abc import Iterable, Mapping

from shared.model.config import ModelConfig
from shared.model.prepared import PreparationError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT = ("self_attn.o_proj",)
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = ("mlp.down_proj",)
PRODUCTS: Mapping[str, tuple[str, ...]] = {"qkv": QKV, "o": OUTPUT, "gate_up": GATE_UP, "down": DOWN}
"""The four products of a layer: the matrices of each are computed as one, their rows one after the other."""
INPUT_NORM, POST_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
Q_NORM, K_NORM = "self_attn.q_norm.weight", "self_attn.k_norm.weight"


def layer_prefix(layer: int) -> str:
    """What the names of a layer's weights begin with."""
    return f"model.layers.{layer}."


def head_name(config: ModelConfig) -> str:
    """The name of the matrix that gives the logits."""
    return EMBEDDING if config.has_tied_head else HEAD


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight that a model of this shape has, no more and no less."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.has_tied_head:
        shapes[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        of_layer: dict[str, tuple[int, ...]] = {
            INPUT_NORM: (hidden,),
            POST_NORM: (hidden,),
            "self_attn.q_proj.weight": (q_rows, hidden),
            "self_attn.k_proj.weight": (kv_rows, hidden),
            "self_attn.v_proj.weight": (kv_rows, hidden),
            "self_attn.o_proj.weight": (hidden, q_rows),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if config.has_qkv_bias:
            of_layer |= {f"{name}.bias": (q_rows if name == QKV[0] else kv_rows,) for name in QKV}
        if config.has_qk_norm:
            of_layer |= {Q_NORM: (head_dim,), K_NORM: (head_dim,)}
        shapes |= {layer_prefix(layer) + name: shape for name, shape in of_layer.items()}
    return shapes


def check_weights(config: ModelConfig, found: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
    """Raises PreparationError for a weight that is missing, has another shape, or would not be used.

    `ignored` may be there or not. A head beside a tied one is ignored too: it is a copy of the embedding.
    """
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise PreparationError(f"weight {name} is missing")
        if tuple(found[name]) != shape:
            raise PreparationError(f"weight {name} has the shape {list(found[name])}, the config says {list(shape)}")
    unused = sorted(set(found) - set(expected) - set(ignored) - {HEAD})
    if unused:
        raise PreparationError(f"weight {unused[0]} is none that a model of this type has")
