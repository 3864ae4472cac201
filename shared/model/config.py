"""The numbers that shape a decoder of the Llama kind, read from a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.model.prepared import PreparationError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")

# Fields that would change the arithmetic, each with the one value that this decoder computes.
_REQUIRED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions. `kind` is default, linear or llama3; the last two stretch the wavelengths by `factor`."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_window: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder with RMS norms, grouped-query attention and a gated SiLU MLP.

    `has_qkv_bias`: a bias on the rows of q, k and v (Qwen2). `has_qk_norm`: each head of q and k goes through an RMS
    norm of its own before it is turned (Qwen3). `has_tied_head`: the head's matrix is the embedding's.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    window: int
    rms_norm_eps: float
    has_tied_head: bool
    rope: RopeConfig
    has_qkv_bias: bool = False
    has_qk_norm: bool = False

    @property
    def qkv_rows(self) -> int:
        """Rows of the product that makes queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attention_size(self) -> int:
        """What attention gives to the output product: all heads side by side."""
        return self.num_heads * self.head_dim

    @staticmethod
    def from_hf(fields: Mapping[str, Any]) -> "ModelConfig":
        """Raises PreparationError, one sentence, for another architecture or variant, or a field that is missing."""
        model_type = fields.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise PreparationError(
                f"model type {model_type!r} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        # Qwen2 always has biases on q, k and v, whatever its config says; a bias elsewhere is nobody's.
        required = dict(_REQUIRED) if model_type == "qwen2" else {**_REQUIRED, "attention_bias": False}
        for name, expected in required.items():
            if fields.get(name, expected) != expected:
                raise PreparationError(f"a {model_type} model with {name} = {fields[name]!r} is not supported")
        try:
            num_heads = int(fields["num_attention_heads"])
            config = ModelConfig(
                num_layers=int(fields["num_hidden_layers"]),
                hidden_size=int(fields["hidden_size"]),
                intermediate_size=int(fields["intermediate_size"]),
                num_heads=num_heads,
                num_kv_heads=int(fields.get("num_key_value_heads") or num_heads),
                head_dim=int(fields.get("head_dim") or int(fields["hidden_size"]) // num_heads),
                vocab_size=int(fields["vocab_size"]),
                window=int(fields["max_position_embeddings"]),
                rms_norm_eps=float(fields["rms_norm_eps"]),
                has_tied_head=bool(fields.get("tie_word_embeddings", False)),
                rope=rope_of(fields),
                has_qkv_bias=model_type == "qwen2",
                has_qk_norm=model_type == "qwen3",
            )
        except KeyError as error:
            raise PreparationError(f"the model's config has no {error.args[0]}") from None
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise PreparationError(f"the model's config has a wrong value ({error})") from None
        config.check()
        return config

    def check(self) -> None:
        """Raises PreparationError when the numbers do not go together."""
        for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise PreparationError(f"the model's config has a wrong value ({name} is {getattr(self, name)})")
        if self.num_heads % self.num_kv_heads:
            raise PreparationError(
                f"the model's config has a wrong value ({self.num_heads} heads on {self.num_kv_heads} key/value heads)"
            )
        if self.head_dim % 2:
            raise PreparationError(f"the model's config has a wrong value (head_dim is odd: {self.head_dim})")


def rope_of(fields: Mapping[str, Any]) -> RopeConfig:
    """The rotary positions that a config asks for; PreparationError for a kind that is not supported."""
    # Newer configs carry one mapping, older ones a base and an optional scaling.
    rope: Mapping[str, Any] = fields.get("rope_parameters") or {
        "rope_theta": fields.get("rope_theta", 10_000.0),
        **(fields.get("rope_scaling") or {}),
    }
    theta = float(rope["rope_theta"])
    match kind := rope.get("rope_type") or rope.get("type") or "default":
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(theta=theta, kind="linear", factor=float(rope["factor"]))
        case "llama3":
            return RopeConfig(
                theta=theta,
                kind="llama3",
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_window=int(rope["original_max_position_embeddings"]),
            )
        case _:
            raise PreparationError(f"rotary positions of type {kind!r} are not supported")
