"""Shape of the paged KV cache and every byte count that follows from it.

A block is one contiguous piece of memory, `block_size` token positions in all layers:

    block  = [layer 0][layer 1]...            layer_block_bytes each
    layer  = [K][V]                           half of that each
    K      = [kv head][head_dim][slot]        a score's sum over head_dim runs along whole vectors of slots
    V      = [kv head][slot][head_dim]        a mix over slots runs along whole vectors of head_dim

Numbers are of `dtype`. With head_dim 1 both halves look alike, which the scripted generator's words make use of.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_HALVES = 2  # keys and values
_VERSION = 2  # of the block form above; a worker of another version is refused at the handshake
_FINGERPRINT_BYTES = 16  # as long as needed to tell layouts apart; nobody forges one inside a cluster
_BFLOAT16 = "bfloat16"  # numpy has no such type; its bits are kept as uint16


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """What both ends of a hand-over must have in common. Raises ValueError when a number makes no sense.

    `dtype` is a numpy name or "bfloat16"; `numerics` is a fingerprint of model, formats and kernels: same bytes, same
    bits.
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
            if self.storage_dtype.hasobject or self.itemsize == 0:
                raise ValueError(f"dtype {self.dtype!r} has no fixed bytes")
        except TypeError:
            raise ValueError(f"dtype {self.dtype!r} is not a numpy type") from None

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """The numpy type that holds a number's bits."""
        return np.dtype(np.uint16 if self.dtype == _BFLOAT16 else self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return self.storage_dtype.itemsize

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token position in one layer."""
        return NUM_HALVES * self.num_kv_heads * self.head_dim * self.itemsize

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
        """Equal exactly when the layouts are equal, numerics and the form of a block included."""
        parts = (
            _VERSION,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.dtype,
            self.block_size,
            self.numerics.hex(),
        )
        return hashlib.blake2b(repr(parts).encode(), digest_size=_FINGERPRINT_BYTES).digest()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions from 0 on take."""
        return -(-num_tokens // self.block_size)
