"""The KV of the scripted generator: per layer a digest of the salt and of all tokens up to its own.

The layout has 4 layers of one K and one V word of 64 bits: 64 bytes a token. Every wrong byte shows: layers differ, so
that a frame put into the wrong layer range does; and as with a model a token's KV depends on everything before it, so
that KV of another request, token, place or beginning does.
"""

import numpy as np
import numpy.typing as npt

from shared.kv.layout import NUM_HALVES, KvLayout
from shared.kv.memory import KvMemory

NUM_LAYERS = 4
_WORD = np.uint64
# Odd constants of the splitmix64 finaliser (Steele, Lea, Flood 2014): every input bit reaches every output bit.
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1 = _WORD(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _WORD(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_LANES: npt.NDArray[np.uint64] = np.array(
    [(lane * _GOLDEN) & _MASK for lane in range(1, NUM_LAYERS * NUM_HALVES + 1)], dtype=_WORD
).reshape(NUM_LAYERS, NUM_HALVES)

Words = npt.NDArray[np.uint64]


def digest_layout(block_size: int) -> KvLayout:
    """The layout of the scripted generator's cache."""
    return KvLayout(
        num_layers=NUM_LAYERS,
        num_kv_heads=1,
        head_dim=1,
        dtype="uint64",
        block_size=block_size,
        numerics=b"scripted-digest-2",
    )


def digest_words(memory: KvMemory) -> Words:
    """The cache as [block, layer, K|V, slot]; writes go through."""
    layout = memory.layout
    return memory.data.view(_WORD).reshape(memory.num_blocks, layout.num_layers, NUM_HALVES, layout.block_size)


def salt_word(salt: int) -> np.uint64:
    """A salt in the form that `digests` takes, spread over all bits."""
    return _mix(np.array([salt & _MASK], dtype=_WORD))[0]


def token_words(tokens: npt.NDArray[np.uint32], positions: npt.NDArray[np.int64]) -> Words:
    """A word for each token at its position. Summed up to a token they stand for it and for all before it."""
    return _mix(tokens.astype(_WORD) + (positions.astype(_WORD) << _WORD(32)) + _WORD(_GOLDEN))


def digests(salts: Words, words: Words) -> Words:
    """[n, layer, K|V, slots] of n rows of slots: words are sums of `token_words`, [n, slots]; salts [n]."""
    mixed = _mix(words + salts[:, None])
    return _mix(mixed[:, None, None, :] + _LANES[None, :, :, None])


def _mix(words: Words) -> Words:
    words = (words ^ (words >> _WORD(30))) * _MULTIPLY_1
    words = (words ^ (words >> _WORD(27))) * _MULTIPLY_2
    return words ^ (words >> _WORD(31))
