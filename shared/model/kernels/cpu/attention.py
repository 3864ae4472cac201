"""Attention over the paged cache: all query heads of one key/value head, for some consecutive tokens of one sequence.

Keys are taken in tiles of 64 and segments of 256, both at absolute positions. A segment is summed by itself (online
softmax, tile after tile), and then joined to the ones before it; so a long sequence's segments may be computed by
several threads and joined afterwards, with the same bits. Nothing else changes a query's order of summation: not the
queries it shares tiles with, and not where blocks begin or lie.

Scratch of a thread for Q queries of head_dim D, one piece after the other, the first at a multiple of 64 bytes:

    queries  float32, for each group of 6, 4, 3, 2 or 1 queries [D][queries of the group]
    lengths  int64 [Q] | key list int64 [16] | value list int64 [8] | scores float32 [6][64]
    state    128 bytes [Q] | sums float32 [Q][D] | earlier float32 [Q][D]
"""

from typing import Final

from shared.model.kernels.cpu.attention_tile import (
    EIGHT,
    LIST_EIGHTS,
    MOST_QUERIES,
    NUM_QUERIES,
    SCORE_BYTES,
    STATE_BYTES,
    TILE_KEYS,
    attend_tile,
    begin,
    begin_earlier,
    end,
    join,
    place_query,
)
from shared.model.kernels.cpu.jit import compiled, inlined
from shared.model.kernels.cpu.kv_write import KV_FLOAT32
from shared.model.kernels.cpu.words import load_word, store_word

SEGMENT_KEYS: Final = 256
_TILE_QUERIES = 24
"""Queries that share a tile of keys and values (32 KiB at head_dim 64) while it lies in the second-level cache."""


def tile_rows(group: int) -> int:
    """Consecutive tokens of a sequence to take together, each with `group` query heads on a key/value head."""
    rows = max(1, _TILE_QUERIES // group)
    # Whole turns of six queries where that is possible.
    return next((fewer for fewer in range(rows, 0, -1) if fewer * group % MOST_QUERIES == 0), rows)


def scratch_bytes(num_queries: int, head_dim: int) -> int:
    """What `attend` needs for itself."""
    vectors = 3 * num_queries * head_dim * 4
    lists = _padded(8 * num_queries) + 3 * 8 * LIST_EIGHTS + MOST_QUERIES * SCORE_BYTES
    return vectors + lists + STATE_BYTES * num_queries + 64


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


@compiled
def _turn(num_left: int) -> int:
    """Queries to take together when so many are left."""
    if num_left >= 6:
        return 6
    return 4 if num_left == 5 else num_left


@compiled
def _list_eights(
    plane: int, table: int, block_bytes: int, block_size: int, slot_bytes: int, start: int, num_eights: int, end: int,
    target: int,
) -> None:  # fmt: skip
    """Addresses of each eight keys, or values, from `start` on; entries beyond the keys' `end` repeat the last."""
    address = plane + load_word(table + 8 * ((end - 1) // block_size)) * block_bytes
    for eight in range(num_eights):
        position = start + eight * EIGHT
        if position < end:
            block = load_word(table + 8 * (position // block_size)) * block_bytes
            address = plane + block + position % block_size * slot_bytes
        store_word(target + 8 * eight, address)


@inlined
def attend(
    kind: int, keys: int, values: int, table: int, block_bytes: int, block_size: int,
    queries: int, query_stride: int, out: int, out_stride: int, num_rows: int, group: int, head_dim: int, position: int,
    scratch: int,
) -> None:  # fmt: skip
    """`num_rows` tokens from `position` on, of one sequence, whose own keys and values are written already.

    `keys` and `values` are the addresses of this layer and key/value head in block 0, `table` that of the sequence's
    blocks (int64). A row of `queries` holds `group` heads of float32, turned and scaled; a row of `out` receives as
    many. Strides in bytes.
    """
    num_queries = num_rows * group
    vectors = head_dim // 8
    row_bytes = head_dim * 4
    item_bytes = 4 if kind == KV_FLOAT32 else 2
    lengths = scratch
    key_list = lengths + (num_queries * 8 + 63) // 64 * 64
    value_list = key_list + 2 * 8 * LIST_EIGHTS
    scores = value_list + 8 * LIST_EIGHTS
    state = scores + MOST_QUERIES * SCORE_BYTES
    placed = state + STATE_BYTES * num_queries
    sums = placed + num_queries * row_bytes
    earlier = sums + num_queries * row_bytes

    first = 0
    while first < num_queries:
        turn = _turn(num_queries - first)
        for each in range(turn):
            query = first + each
            row = query // group
            head = query % group
            source = queries + row * query_stride + head * row_bytes
            place_query((source, placed + first * row_bytes + 4 * each, 4 * turn, head_dim))
            store_word(lengths + 8 * query, position + row + 1)
            begin_earlier((state + query * STATE_BYTES, earlier + query * row_bytes, vectors))
        first += turn

    num_keys = position + num_rows
    for segment in range(0, num_keys, SEGMENT_KEYS):
        for query in range(num_queries):
            begin((state + query * STATE_BYTES, sums + query * row_bytes, vectors))
        for start in range(segment, min(num_keys, segment + SEGMENT_KEYS), TILE_KEYS):
            in_tile = min(TILE_KEYS, num_keys - start)
            # A tile's keys and the next one's, which are asked for ahead.
            _list_eights(
                keys, table, block_bytes, block_size, item_bytes, start, 2 * LIST_EIGHTS, num_keys, key_list
            )  # fmt: skip
            _list_eights(
                values, table, block_bytes, block_size, item_bytes * head_dim, start, LIST_EIGHTS, num_keys, value_list
            )  # fmt: skip
            first = 0
            while first < num_queries:
                turn = _turn(num_queries - first)
                attend_tile(
                    kind * NUM_QUERIES + turn,
                    (
                        placed + first * row_bytes, key_list, value_list, head_dim, block_size * item_bytes, start,
                        in_tile, lengths + 8 * first, state + first * STATE_BYTES, sums + first * row_bytes, scores,
                    ),
                )  # fmt: skip
                first += turn
        for query in range(num_queries):
            of_query = state + query * STATE_BYTES
            join((of_query, sums + query * row_bytes, of_query, earlier + query * row_bytes, vectors))

    for query in range(num_queries):
        target = out + (query // group) * out_stride + (query % group) * row_bytes
        end((state + query * STATE_BYTES, earlier + query * row_bytes, target, vectors))
