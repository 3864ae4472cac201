"""Tests of `shared.engine.kv_digest`."""

import numpy as np
import numpy.typing as npt

from shared.engine.kv_digest import digest_layout, digest_words, digests, salt_word, token_words
from shared.kv.memory import KvMemory


def _words(*tokens: int) -> npt.NDArray[np.uint64]:
    return token_words(np.array(tokens, dtype=np.uint32), np.arange(len(tokens))).cumsum()


def _one(salt: int, *tokens: int) -> tuple[int, ...]:
    """The digests of the last of these tokens."""
    words = digests(np.array([salt_word(salt)]), _words(*tokens)[None, -1:])
    return tuple(int(word) for word in words.ravel())


def test_a_token_takes_64_bytes_in_several_layers() -> None:
    """The bound of the scripted generator, and enough layers for layer ranges to mean something."""
    layout = digest_layout(16)

    assert (64, 4) == (layout.token_bytes, layout.num_layers)


def test_every_ingredient_matters_in_every_word() -> None:
    """Another salt, token, place or beginning changes each layer's K and V; no two words of a token are equal."""
    base = _one(1, 2, 3)
    others = [
        _one(0, 2, 3),
        _one(2**64 - 1, 2, 3),
        _one(1, 2, 4),
        _one(1, 5, 3),
        _one(1, 3, 2),
        _one(1, 3),
        _one(1, 2, 2, 3),
        _one(1, 0, 2, 3),
    ]

    assert 8 == len(set(base))
    assert not any(word in other for other in others for word in base)


def test_one_row_is_the_same_in_company() -> None:
    """Row and slot stand for themselves: [row, layer, K|V, slot]."""
    words = digests(np.array([salt_word(1), salt_word(2)]), np.stack([_words(5, 6), _words(7, 8)]))

    assert (2, 4, 2, 2) == words.shape
    assert _one(2, 7, 8) == tuple(int(word) for word in words[1, :, :, 1].ravel())


def test_words_are_the_cache_itself() -> None:
    """What is written through the view lies at the layout's place."""
    memory = KvMemory(digest_layout(4), 3)
    digest_words(memory)[2, 3, 1, 3] = 77

    assert 77 == int(memory.data[2, -8:].view(np.uint64)[0])
