"""A lean Llama decoder in float32 over the paged cache: few operators a layer, all of a step in one batch of rows."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional
from safetensors import SafetensorError, safe_open

from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory
from shared.model.config import ModelConfig
from shared.model.layers import Linear, as_tensor, attend, make_linear, rotary_table, rotate
from shared.model.paging import PagePlan, Segment, plan_pages
from shared.model.prepared import PreparationError, PreparedModel

KERNEL_VERSION = "f32-1"
"""Grows with any change that may change a bit of keys, values or logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Weights ready for computing. One thread at a time may call `forward`.

    A row's logits, keys and values have the same bits whatever other segments are in the step. They do depend on how
    its own prompt is cut into chunks, since a chunk's attention is one product.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], source_hash: str) -> None:
        self.config = config
        self.source_hash = source_hash
        self._embedding = weights["model.embed_tokens.weight"]
        self._layers = [_layer(weights, f"model.layers.{number}.") for number in range(config.num_layers)]
        self._norm = weights["model.norm.weight"]
        self._head = make_linear(self._embedding if config.has_tied_head else weights["lm_head.weight"])
        self._cosines, self._sines = rotary_table(config.rope, config.head_dim, config.window)

    @staticmethod
    def load(folder: Path, num_threads: int | None = None) -> "LlamaModel":
        """Read a prepared folder. Sets torch's thread count for the whole process; None leaves it at all cores.

        Raises PreparationError, one sentence, when the folder is not usable.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        prepared = PreparedModel.load(folder)
        config = ModelConfig.from_hf(prepared.config)
        try:
            with torch.inference_mode(), cast("Any", safe_open)(prepared.weights_path, framework="pt") as file:
                weights = {name: cast("torch.Tensor", file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
                return LlamaModel(config, weights, prepared.source_hash)
        except (OSError, SafetensorError, KeyError, RuntimeError):
            raise PreparationError(
                f"{prepared.weights_path} is missing or damaged; delete the folder and prepare again"
            ) from None

    def layout(self, block_size: int) -> KvLayout:
        """The cache form. Its numerics tell apart everything that may change a bit."""
        parts = (
            KERNEL_VERSION,
            self.source_hash,
            torch.__version__,
            torch.backends.cpu.get_cpu_capability(),
            type(self._head).__name__,
        )
        return KvLayout(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype="float32",
            block_size=block_size,
            numerics=hashlib.blake2b(repr(parts).encode(), digest_size=16).digest(),
        )

    @torch.inference_mode()
    def forward(self, memory: KvMemory, segments: Sequence[Segment]) -> npt.NDArray[np.float32]:
        """Compute all segments in one step, writing their keys and values into `memory`.

        Returns the logits [segments that want them, vocabulary] in the order of the segments. Raises ValueError for a
        segment that does not fit its blocks, the window or the vocabulary; nothing is written then.
        """
        config = self.config
        ids = np.concatenate([np.asarray(segment.token_ids, dtype=np.int64) for segment in segments])
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            raise ValueError(f"a token id lies outside the vocabulary of {config.vocab_size}")
        if max(segment.end for segment in segments) > config.window:
            raise ValueError(f"a sequence is longer than the window of {config.window} tokens")
        plan = plan_pages(memory.layout, segments, memory.num_blocks)
        all_keys, all_values = as_tensor(memory.keys()), as_tensor(memory.values())
        positions = as_tensor(np.concatenate([np.arange(each.start, each.end) for each in segments]))
        cosines, sines = self._cosines[positions].unsqueeze(1), self._sines[positions].unsqueeze(1)
        masks = [_causal_mask(segment) for segment in segments]

        rows = self._embedding[as_tensor(ids)]
        for number, layer in enumerate(self._layers):
            normed = functional.rms_norm(rows, (config.hidden_size,), layer.attention_norm, config.rms_norm_eps)
            heads = layer.qkv(normed).view(len(ids), -1, config.head_dim)
            mixed = self._attention(heads, cosines, sines, all_keys[:, number], all_values[:, number], plan, masks)
            rows = rows + layer.output(mixed)
            normed = functional.rms_norm(rows, (config.hidden_size,), layer.mlp_norm, config.rms_norm_eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            rows = rows + layer.down(functional.silu(gate) * up)

        lasts = np.cumsum([len(segment.token_ids) for segment in segments]) - 1
        wanted = as_tensor(lasts[[segment.want_logits for segment in segments]])
        if not len(wanted):
            return np.zeros((0, config.vocab_size), dtype=np.float32)
        normed = functional.rms_norm(rows[wanted], (config.hidden_size,), self._norm, config.rms_norm_eps)
        return self._head(normed).numpy()

    def _attention(
        self,
        heads: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        all_keys: torch.Tensor,
        all_values: torch.Tensor,
        plan: PagePlan,
        masks: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        """Heads [rows, q, k and v heads, head_dim] of a layer, in whose cache it writes; returns [rows, mixed].

        The layer's cache: `all_keys` [block, kv head, head_dim, slot], `all_values` [block, kv head, slot, head_dim].
        """
        num_heads, num_kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        heads[:, : num_heads + num_kv_heads] = rotate(heads[:, : num_heads + num_kv_heads], cosines, sines)
        written_keys, written_values = heads[:, num_heads:].chunk(2, dim=1)
        all_keys[plan.written_blocks, :, :, plan.written_slots] = written_keys
        all_values[plan.written_blocks, :, plan.written_slots] = written_values
        mixed: list[torch.Tensor] = []
        row = 0
        for table, length, mask in zip(plan.tables, plan.lengths, masks, strict=True):
            num_rows = 1 if mask is None else mask.shape[0]
            keys = all_keys[table].permute(1, 0, 3, 2).reshape(num_kv_heads, -1, head_dim)[:, :length]
            values = all_values[table].permute(1, 0, 2, 3).reshape(num_kv_heads, -1, head_dim)[:, :length]
            queries = heads[row : row + num_rows, :num_heads]
            mixed.append(attend(queries, keys, values, mask, head_dim**-0.5))
            row += num_rows
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def _causal_mask(segment: Segment) -> torch.Tensor | None:
    """What is added to the scores [tokens, positions]: nothing up to a token's own position, minus infinity beyond."""
    num_rows = len(segment.token_ids)
    if num_rows == 1:
        return None
    full = torch.full((num_rows, segment.end), -torch.inf)
    return full.triu_(segment.start + 1)


def _layer(weights: Mapping[str, torch.Tensor], prefix: str) -> _Layer:
    def fused(*names: str) -> Linear:
        return make_linear(torch.cat([weights[f"{prefix}{name}_proj.weight"] for name in names]))

    return _Layer(
        attention_norm=weights[f"{prefix}input_layernorm.weight"],
        qkv=fused("self_attn.q", "self_attn.k", "self_attn.v"),
        output=fused("self_attn.o"),
        mlp_norm=weights[f"{prefix}post_attention_layernorm.weight"],
        gate_up=fused("mlp.gate", "mlp.up"),
        down=fused("mlp.down"),
    )
