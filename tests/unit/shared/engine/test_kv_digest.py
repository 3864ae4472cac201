"""Tests of `shared.engine.kv_digest`."""

import numpy as np

from shared.engine.kv_digest import digest_layout, digest_words, digests, salt_word
from shared.kv.memory import KvMemory


def _one(salt: int, token: int, position: int) -> tuple[int, ...]:
    words = digests(
        np.array([salt_word(salt)]), np.array([[token]], dtype=np.uint32), np.array([[position]], dtype=np.int64)
    )
    return tuple(int(word) for word in words.ravel())


def test_a_token_takes_64_bytes_in_several_layers() -> None:
    """The bound of the scripted generator, and enough layers for layer ranges to mean something."""
    layout = digest_layout(16)

    assert (64, 4) == (layout.token_bytes, layout.num_layers)


def test_every_ingredient_matters_in_every_word() -> None:
    """Another salt, token or position changes each layer's K and V; no two words of a token are equal."""
    base = _one(1, 2, 3)
    others = [_one(0, 2, 3), _one(1, 3, 3), _one(1, 2, 4), _one(2**64 - 1, 2, 3), _one(1, 3, 2)]

    assert 8 == len(set(base))
    assert not any(word in other for other in others for word in base)


def test_one_row_is_the_same_in_company() -> None:
    """Row and slot stand for themselves: [row, layer, K|V, slot]."""
    tokens = np.array([[5, 6], [7, 8]], dtype=np.uint32)
    positions = np.array([[0, 1], [9, 10]], dtype=np.int64)
    words = digests(np.array([salt_word(1), salt_word(2)]), tokens, positions)

    assert (2, 4, 2, 2) == words.shape
    assert _one(2, 8, 10) == tuple(int(word) for word in words[1, :, :, 1].ravel())


def test_words_are_the_cache_itself() -> None:
    """What is written through the view lies at the layout's place."""
    memory = KvMemory(digest_layout(4), 3)
    digest_words(memory)[2, 3, 1, 3] = 77

    assert 77 == int(memory.data[2, -8:].view(np.uint64)[0])
