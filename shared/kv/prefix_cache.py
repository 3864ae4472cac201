"""Finds the blocks that hold the KV of a prompt's beginning.

A block is known by a digest that is chained over all blocks before it and keyed by the request's salt:

    link 0 = zeros      link n = blake2b(link n-1 | token ids of block n, key = salt)

so equal links mean equal tokens from position 0 on, under the same salt. A hit does not rely on the digest: the block's
token ids and the link before it are compared, which block by block is the whole beginning of the prompt.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from shared.domain.ids import BlockId, TokenId
from shared.kv.block_pool import BlockPool

_LINK_BYTES = 16  # collisions by chance are out of the question, and one made on purpose fails the comparison
CHAIN_START = bytes(_LINK_BYTES)


class PrefixCache:
    """The index over one pool. Same owner thread. A call costs by the blocks of its tokens, whatever the pool holds.

    Without a parent a block cannot be found, so the pool evicts the end of a sequence before its beginning. Blocks of
    an evicted beginning age out, or are found again when the beginning is computed again: their links are still true.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._blocks: dict[bytes, BlockId] = {}  # by link
        # By block, and written only for those in `_blocks`. Arrays: a pool of half a million blocks costs 100 bytes
        # each at most.
        self._links: npt.NDArray[np.uint8] = np.zeros((pool.num_blocks, 2, _LINK_BYTES), dtype=np.uint8)
        self._tokens: npt.NDArray[np.uint32] = np.zeros((pool.num_blocks, block_size), dtype=np.uint32)
        self._num_evicted = 0
        pool.watch_evictions(self._forget)

    def __len__(self) -> int:
        """Blocks that can be found, those in use included."""
        return len(self._blocks)

    def match(self, token_ids: Sequence[TokenId], *, salt: int, max_tokens: int) -> tuple[BlockId, ...]:
        """The longest run of whole blocks that hold the first tokens, at most `max_tokens` of them.

        The caller becomes a holder of each: he reads them, never writes, and frees them like his own.
        """
        found: list[BlockId] = []
        befores, tokens = bytearray(), bytearray()
        link = CHAIN_START
        for piece in self._pieces(token_ids[: max(max_tokens, 0)]):
            before, link = link, _next_link(link, piece, salt)
            block_id = self._blocks.get(link)
            if block_id is None:
                break
            found.append(block_id)
            befores += before
            tokens += piece
        del found[self._num_equal(found, befores, tokens) :]
        self._pool.share(found)
        return tuple(found)

    def insert(
        self, token_ids: Sequence[TokenId], *, salt: int, block_ids: Sequence[BlockId], after: bytes = CHAIN_START
    ) -> bytes:
        """Make active blocks findable: the n-th holds the n-th `block_size` of these tokens, all whole and computed.

        Blocks beyond the last whole one are left alone. What is there already keeps the block that it has. `after` is
        the result of the insert of the tokens before these, in the same sequence. Raises ValueError, and files nothing,
        when blocks are missing or not active.
        """
        num_whole = len(token_ids) // self._block_size
        if len(block_ids) < num_whole:
            raise ValueError(f"{len(block_ids)} blocks for {num_whole} blocks of tokens")
        link = after
        filed: list[BlockId] = []
        links, tokens = bytearray(), bytearray()
        for piece, block_id in zip(self._pieces(token_ids), block_ids, strict=False):
            before, link = link, _next_link(link, piece, salt)
            if link not in self._blocks:
                filed.append(block_id)
                links += before + link
                tokens += piece
        if filed:
            self._pool.index(filed)
            rows = np.array(filed, dtype=np.int64)
            self._links[rows] = np.frombuffer(links, dtype=np.uint8).reshape(-1, 2, _LINK_BYTES)
            self._tokens[rows] = np.frombuffer(tokens, dtype=np.uint32).reshape(-1, self._block_size)
            for place, block_id in enumerate(filed):
                own = (2 * place + 1) * _LINK_BYTES
                self._blocks[bytes(links[own : own + _LINK_BYTES])] = block_id
        return link

    def withdraw(self, block_ids: Sequence[BlockId]) -> None:
        """What these held blocks hold is wrong: none of them is found any more. Those that could not be are skipped."""
        filed = [block_id for block_id in block_ids if self._pool.is_indexed(block_id)]
        self._pool.unindex(filed)
        for block_id in filed:
            del self._blocks[self._links[block_id, 1].tobytes()]

    def take_evictions(self) -> int:
        """How many blocks' content was given up since the last call."""
        taken, self._num_evicted = self._num_evicted, 0
        return taken

    def check_integrity(self) -> None:
        """Raise AssertionError unless pool and index agree, and every block is filed under what it holds."""
        self._pool.check_integrity()
        if len(set(self._blocks.values())) != len(self._blocks):
            raise AssertionError("a block is filed twice")
        for link, block_id in self._blocks.items():
            if not self._pool.is_indexed(block_id):
                raise AssertionError(f"block {block_id} can be found and is {self._pool.state(block_id)}")
            if self._links[block_id, 1].tobytes() != link:
                raise AssertionError(f"block {block_id} is filed under another's link")
        if self._pool.num_indexed != len(self._blocks):
            raise AssertionError("the pool keeps blocks that nobody can find")

    def _pieces(self, token_ids: Sequence[TokenId]) -> list[bytes]:
        """The whole blocks' token ids as bytes."""
        num_whole = len(token_ids) // self._block_size
        data = np.array(token_ids[: num_whole * self._block_size], dtype=np.uint32).tobytes()
        size = self._block_size * np.dtype(np.uint32).itemsize
        return [data[start : start + size] for start in range(0, len(data), size)]

    def _num_equal(self, block_ids: list[BlockId], befores: bytearray, tokens: bytearray) -> int:
        """How many of the blocks, from the first on, hold these tokens after these links."""
        rows = np.array(block_ids, dtype=np.int64)
        same_tokens = self._tokens[rows] == np.frombuffer(tokens, dtype=np.uint32).reshape(-1, self._block_size)
        same_before = self._links[rows, 0] == np.frombuffer(befores, dtype=np.uint8).reshape(-1, _LINK_BYTES)
        is_equal = same_tokens.all(axis=1) & same_before.all(axis=1)
        return len(block_ids) if is_equal.all() else int(is_equal.argmin())

    def _forget(self, block_id: BlockId) -> None:
        del self._blocks[self._links[block_id, 1].tobytes()]
        self._num_evicted += 1


def _next_link(link: bytes, piece: bytes, salt: int) -> bytes:
    return blake2b(link + piece, digest_size=_LINK_BYTES, key=salt.to_bytes(8, "little")).digest()
