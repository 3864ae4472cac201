"""Shape of the paged KV cache and every byte count that follows from it.

A block is one contiguous piece of memory, `block_size` token positions in all layers:

    block  = [layer 0][layer 1]...            layer_block_bytes each
    layer  = [K][V]                           each [kv head][slot][head_dim] of `dtype`
"""

import hashlib
from dataclasses import dataclass

import numpy as np

NUM_HALVES = 2  # keys and values
_FINGERPRINT_BYTES = 16  # as long as needed to tell layouts apart; nobody forges one inside a cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """What both ends of a hand-over must have in common. Raises ValueError when a number makes no sense.

    `dtype` is a numpy name; `numerics` is a fingerprint of model, formats and kernels: same bytes, same bits.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    numerics: bytes

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        try:
            np.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"dtype {self.dtype!r} is not a numpy type") from None

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token position in one layer."""
        return NUM_HALVES * self.num_kv_heads * self.head_dim * np.dtype(self.dtype).itemsize

    @property
    def token_bytes(self) -> int:
        return self.num_layers * self.layer_token_bytes

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one layer, keys and values, of one block."""
        return self.block_size * self.layer_token_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_block_bytes

    @property
    def fingerprint(self) -> bytes:
        """Equal exactly when the layouts are equal, numerics included."""
        parts = (self.num_layers, self.num_kv_heads, self.head_dim, self.dtype, self.block_size, self.numerics.hex())
        return hashlib.blake2b(repr(parts).encode(), digest_size=_FINGERPRINT_BYTES).digest()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions from 0 on take."""
        return -(-num_tokens // self.block_size)
