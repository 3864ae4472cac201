"""The weights of a GGUF file: their Hugging Face names, their float32 numbers, and their groups where it has some."""

from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, dequantize

from shared.model.config import ModelConfig
from shared.model.groups import Groups
from shared.model.prepared import PreparationError

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: what Llama 3.1's frequencies are divided by. Read with the config."""

_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_SCALE_BYTES = 2  # a float16
_Q4_0_ZERO = 8  # the integer that stands for 0


def read_tensor(
    tensor: Any, config: ModelConfig, architecture: str
) -> tuple[str, npt.NDArray[np.float32], Groups | None]:
    """Of one of `gguf`'s tensors: name, float32 numbers, and groups if it is in Q4_0, Q4_1 or Q8_0.

    Raises PreparationError for a tensor that models of this kind do not have, or that cannot be read.
    """
    name = _hf_name(tensor.name)
    if name is None:
        raise PreparationError(f"weight {tensor.name} is none that a model of this type has")
    try:
        groups = _groups(tensor)
        if groups is None:
            values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        else:
            values = groups.dequantised()
    except (NotImplementedError, ValueError, KeyError):
        raise PreparationError(f"weight {tensor.name} is damaged or of a type that is not supported") from None
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        num_heads = config.num_heads if "q_proj" in name else config.num_kv_heads
        if values.ndim != 2 or values.shape[0] % (2 * num_heads):
            raise PreparationError(f"weight {tensor.name} has {values.shape[0]} rows, no pairs for {num_heads} heads")
        values = _rotary_halves(values, num_heads)
        if groups is not None and groups.m is not None:
            groups = Groups(
                q=_rotary_halves(groups.q, num_heads),
                d=_rotary_halves(groups.d, num_heads),
                m=_rotary_halves(groups.m, num_heads),
            )
    return name, np.ascontiguousarray(values), groups


def _groups(tensor: Any) -> Groups | None:
    """The file's blocks of 32 numbers along a row: float16 scales, then the integers."""
    data: npt.NDArray[np.uint8] = np.asarray(tensor.data)
    if data.ndim != 2:
        return None
    rows = len(data)
    match tensor.tensor_type:
        case GGMLQuantizationType.Q4_0:
            d, qs = _split(data, num_scales=1, num_bytes=16)
            return Groups(q=_nibbles(qs, rows), d=d[..., 0], m=(d[..., 0] * np.float16(-_Q4_0_ZERO)))
        case GGMLQuantizationType.Q4_1:
            scales, qs = _split(data, num_scales=2, num_bytes=16)
            return Groups(q=_nibbles(qs, rows), d=scales[..., 0].copy(), m=scales[..., 1].copy())
        case GGMLQuantizationType.Q8_0:
            d, qs = _split(data, num_scales=1, num_bytes=32)
            return Groups(q=qs.view(np.int8).reshape(rows, -1), d=d[..., 0], m=None)
        case _:
            return None


def _split(
    data: npt.NDArray[np.uint8], *, num_scales: int, num_bytes: int
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.uint8]]:
    """Scales [rows, groups, num_scales] and bytes [rows, groups, num_bytes]."""
    head = num_scales * _SCALE_BYTES
    blocks = data.reshape(len(data), -1, head + num_bytes)
    scales = np.ascontiguousarray(blocks[..., :head]).view(np.float16)
    return scales, np.ascontiguousarray(blocks[..., head:])


def _nibbles(qs: npt.NDArray[np.uint8], rows: int) -> npt.NDArray[np.uint8]:
    """A block's low halves are its first 16 numbers, the high halves the other 16."""
    halves = (qs & np.uint8(15), qs >> np.uint8(4))
    return np.concatenate(halves, axis=-1, dtype=np.uint8).reshape(rows, -1)


def _hf_name(name: str) -> str | None:
    """The Hugging Face name of a weight; None for one that these architectures do not have."""
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    match name.split(".", 2):
        case ["blk", number, kind] if number.isdigit() and kind in _LAYER_TENSORS:
            return f"model.layers.{int(number)}.{_LAYER_TENSORS[kind]}"
        case _:
            return None


def _rotary_halves(values: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """The llama form interleaves the two halves of each head's rotary pairs; put them back one after the other."""
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
