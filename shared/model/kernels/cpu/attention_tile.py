"""Attention of a few queries over one tile of 64 keys: scores, weights, and the weighted sum of the values.

A query's numbers depend on its own keys alone. Each score is one chain of fused products over head_dim; the weights of
a tile are added key by key in eight lanes; the sum over the values goes key by key. Keys beyond a query's length weigh
exactly 0, and what lies beyond the longest query's length is not multiplied at all, so that stale memory cannot tell.

Queries are taken 6, 4, 3, 2 or 1 at a time, which share every load of keys and values:

    queries  [head_dim][number of queries] float32, scaled
    scores   [query][64] float32: scratch, then the weights of the tile
    state    [query] of 128 bytes: 0 largest score of the segment | 4 correction | 32 sum of weights, eight lanes |
             64 largest score of the segments before | 96 their sum of weights, eight lanes
    sums     [query][head_dim] float32: values of the segment, weighted
    earlier  [query][head_dim] float32: the same of the segments before

Keys and values come by lists of addresses, one for each eight keys: [head_dim][slot] and [slot][head_dim] in the block.
Where few queries share a tile the time goes to memory, and blocks lie anywhere: while scores are computed the tile's
values are asked for, and while values are summed the next tile's keys.
"""

from typing import Any, Final

from shared.model.kernels.cpu.kv_write import KV_FLOAT32, KV_KINDS, load_numbers
from shared.model.kernels.cpu.vectors import (
    INT64,
    Emitter,
    MicroKernel,
    Value,
    constant,
    f32,
    f32x8,
    i32,
    i32x8,
    i64,
    micro_kernel,
    select_kernel,
)

TILE_KEYS: Final = 64
EIGHT: Final = 8
"""Keys that lie together: a vector of scores."""
LIST_EIGHTS: Final = TILE_KEYS // EIGHT
STATE_BYTES: Final = 128
SCORE_BYTES: Final = TILE_KEYS * 4
MOST_QUERIES: Final = 6
"""Queries taken together: with two vectors of keys or values each they fill twelve of sixteen registers."""

_CORRECTION, _LANES, _BEFORE, _BEFORE_LANES = 4, 32, 64, 96  # places in a query's state
_NO_KEY = -1e30  # below any score; exp of the distance to one is not quite 0, what it multiplies is
_KEY_EIGHTS = {1: 4, 2: 4, 3: 4, 4: 2, 6: 2}  # vectors of keys at a time: eight to twelve independent chains
_VALUE_VECTORS = {1: 4, 2: 4, 3: 4, 4: 2, 6: 2}  # vectors of a value's head_dim at a time
_MOST_PREFETCHING = 4  # queries; six are the rows of a prompt, the first of many that share the tile
_LINE = 64  # bytes of the cache


class _Tile:
    """Writes the body for one number of queries and one type of the cache."""

    def __init__(self, num_queries: int, kind: int) -> None:
        self.num_queries = num_queries
        self.kind = kind
        self.item_bytes = 4 if kind == KV_FLOAT32 else 2

    def emit(
        self,
        emit: Emitter,
        queries: Value,
        key_list: Value,
        value_list: Value,
        head_dim: Value,
        key_stride: Value,
        start: Value,
        num_keys: Value,
        lengths: Value,
        state: Value,
        sums: Value,
        scores: Value,
    ) -> None:
        """Parameters as those of `attend_tile`."""
        builder = emit.builder
        num_eights = builder.udiv(emit.at(num_keys, EIGHT - 1), constant(i64, EIGHT))
        self._scores(emit, queries, key_list, value_list, head_dim, key_stride, num_eights, scores)
        for query in range(self.num_queries):
            length = builder.sub(emit.load(i64, lengths, 8 * query), start)
            self._weights(
                emit, length, num_eights, emit.at(state, query * STATE_BYTES), emit.at(scores, query * SCORE_BYTES)
            )
        next_keys = emit.at(key_list, 8 * LIST_EIGHTS)
        self._mix(emit, value_list, next_keys, head_dim, key_stride, num_keys, state, sums, scores)

    def _scores(
        self,
        emit: Emitter,
        queries: Value,
        key_list: Value,
        value_list: Value,
        head_dim: Value,
        key_stride: Value,
        num_eights: Value,
        scores: Value,
    ) -> None:
        builder, together = emit.builder, _KEY_EIGHTS[self.num_queries]
        turns = builder.udiv(emit.at(num_eights, together - 1), constant(i64, together))
        with emit.loop(turns) as turn:
            listed = emit.at(key_list, emit.times(turn, 8 * together))
            keys = [emit.load(i64, listed, 8 * each) for each in range(together)]
            values_at = emit.at(value_list, emit.times(turn, 8 * together))
            values = [emit.load(i64, values_at, 8 * each) for each in range(together)]
            chains = [
                [emit.variable(f32x8, constant(f32x8, 0.0)) for _ in range(together)] for _ in range(self.num_queries)
            ]
            with emit.loop(builder.udiv(head_dim, constant(i64, 4))) as four:
                for each in range(4):
                    place = emit.at(emit.times(four, 4), each)
                    distance = emit.times(place, key_stride)
                    vectors = [load_numbers(emit, self.kind, emit.at(key, distance)) for key in keys]
                    if self.num_queries <= _MOST_PREFETCHING:
                        # Eight values are head_dim / 2 lines, or half as many: one at every second step.
                        line = emit.times(builder.lshr(place, constant(i64, 1)), _LINE)
                        for value in values[each % 2 :: 2]:
                            emit.prefetch(emit.at(value, line))
                    query_at = emit.at(queries, emit.times(place, 4 * self.num_queries))
                    for query, chain in enumerate(chains):
                        number = emit.load_broadcast(f32, query_at, 4 * query)
                        for vector, variable in zip(vectors, chain, strict=True):
                            emit.set(variable, emit.fma(vector, number, emit.get(variable)))
            out = emit.at(scores, emit.times(turn, 32 * together))
            for query, chain in enumerate(chains):
                for each, variable in enumerate(chain):
                    emit.store(emit.get(variable), out, query * SCORE_BYTES + 32 * each)

    @staticmethod
    def _weights(emit: Emitter, length: Value, num_eights: Value, state: Value, scores: Value) -> None:
        """Scores of one query to weights; its largest score, correction and sum of weights to its state."""
        builder = emit.builder
        lengths, lanes = emit.broadcast(builder.trunc(length, i32)), constant(i32x8, range(8))

        def seen(eight: Value) -> Value:
            first = emit.broadcast(builder.trunc(emit.times(eight, EIGHT), i32))
            return builder.icmp_signed("<", builder.add(lanes, first), lengths)

        largest = emit.variable(f32x8, constant(f32x8, _NO_KEY))
        with emit.loop(num_eights) as eight:
            score = emit.load(f32x8, emit.at(scores, emit.times(eight, 32)))
            score = builder.select(seen(eight), score, constant(f32x8, _NO_KEY))
            emit.set(largest, emit.larger(score, emit.get(largest)))
        before = emit.load(f32, state)
        after = emit.larger(emit.largest_lane(emit.get(largest)), before)
        afters = emit.broadcast(after)
        total = emit.variable(f32x8, constant(f32x8, 0.0))
        with emit.loop(num_eights) as eight:
            here = emit.at(scores, emit.times(eight, 32))
            weight = emit.exp(builder.fsub(emit.load(f32x8, here), afters))
            weight = builder.select(seen(eight), weight, constant(f32x8, 0.0))
            emit.store(weight, here)
            emit.set(total, builder.fadd(emit.get(total), weight))
        correction = emit.exp(builder.fsub(emit.broadcast(before), afters))
        emit.store(after, state)
        emit.store(builder.extract_element(correction, constant(i32, 0)), state, _CORRECTION)
        emit.store(emit.fma(emit.load(f32x8, state, _LANES), correction, emit.get(total)), state, _LANES)

    def _mix(
        self,
        emit: Emitter,
        value_list: Value,
        next_keys: Value,
        head_dim: Value,
        key_stride: Value,
        num_keys: Value,
        state: Value,
        sums: Value,
        scores: Value,
    ) -> None:
        builder, together = emit.builder, _VALUE_VECTORS[self.num_queries]
        row_bytes = emit.times(head_dim, 4)
        value_bytes = emit.times(head_dim, self.item_bytes)
        full = builder.udiv(num_keys, constant(i64, EIGHT))
        rest = builder.and_(num_keys, constant(i64, EIGHT - 1))
        corrections = [
            emit.load_broadcast(f32, state, query * STATE_BYTES + _CORRECTION) for query in range(self.num_queries)
        ]
        with emit.loop(builder.udiv(head_dim, constant(i64, 8 * together))) as part:
            part_at = emit.at(sums, emit.times(part, 32 * together))
            rows = [emit.at(part_at, emit.times(row_bytes, query)) for query in range(self.num_queries)]
            totals = [
                [
                    emit.variable(f32x8, builder.fmul(emit.load(f32x8, row, 32 * vector), correction))
                    for vector in range(together)
                ]
                for row, correction in zip(rows, corrections, strict=True)
            ]
            part_bytes = emit.times(part, 8 * together * self.item_bytes)

            def add_key(value: Value, weights: Value, offset: int, totals: list[list[Any]] = totals) -> None:
                numbers = [
                    load_numbers(emit, self.kind, value, 8 * vector * self.item_bytes) for vector in range(together)
                ]
                for query, total in enumerate(totals):
                    weight = emit.load_broadcast(f32, weights, query * SCORE_BYTES + offset)
                    for number, variable in zip(numbers, total, strict=True):
                        emit.set(variable, emit.fma(number, weight, emit.get(variable)))

            with emit.loop(full) as eight:
                value = emit.at(emit.load(i64, emit.at(value_list, emit.times(eight, 8))), part_bytes)
                weights = emit.at(scores, emit.times(eight, 32))
                # Of 16 keys in one block each line is asked for once, by the two eights and all parts together.
                pair = builder.and_(eight, constant(i64, ~1))
                upcoming = emit.load(i64, emit.at(next_keys, emit.times(pair, 8)))
                odd = builder.and_(eight, constant(i64, 1))
                lines = together // 2  # at each key
                first_line = emit.times(emit.at(emit.times(part, 2), odd), EIGHT * lines)
                for key in range(EIGHT):
                    if self.num_queries <= _MOST_PREFETCHING:
                        for line in range(lines):
                            number = emit.at(first_line, key * lines + line)
                            emit.prefetch(emit.at(upcoming, emit.times(number, key_stride)))
                    add_key(emit.at(value, emit.times(value_bytes, key)), weights, 4 * key)
            last = builder.udiv(builder.sub(num_keys, constant(i64, 1)), constant(i64, EIGHT))
            value = emit.at(emit.load(i64, emit.at(value_list, emit.times(last, 8))), part_bytes)
            weights = emit.at(scores, emit.times(last, 32))
            with emit.loop(rest) as key:
                add_key(emit.at(value, emit.times(value_bytes, key)), emit.at(weights, emit.times(key, 4)), 0)
            for row, total in zip(rows, totals, strict=True):
                for vector, variable in enumerate(total):
                    emit.store(emit.get(variable), row, 32 * vector)


def _place_query(emit: Emitter, query: Value, out: Value, stride: Value, head_dim: Value) -> None:
    with emit.loop(head_dim) as place:
        number = emit.load(f32, emit.at(query, emit.times(place, 4)))
        emit.store(number, emit.at(out, emit.times(place, stride)))


def _begin(emit: Emitter, state: Value, sums: Value, num_vectors: Value) -> None:
    emit.store(constant(f32, _NO_KEY), state)
    emit.store(constant(f32x8, 0.0), state, _LANES)
    with emit.loop(num_vectors) as index:
        emit.store(constant(f32x8, 0.0), emit.at(sums, emit.times(index, 32)))


def _begin_earlier(emit: Emitter, state: Value, earlier: Value, num_vectors: Value) -> None:
    emit.store(constant(f32, _NO_KEY), state, _BEFORE)
    emit.store(constant(f32x8, 0.0), state, _BEFORE_LANES)
    with emit.loop(num_vectors) as index:
        emit.store(constant(f32x8, 0.0), emit.at(earlier, emit.times(index, 32)))


def _join(emit: Emitter, state: Value, sums: Value, earlier_state: Value, earlier: Value, num_vectors: Value) -> None:
    builder = emit.builder
    largest, before = emit.load(f32, state), emit.load(f32, earlier_state, _BEFORE)
    after = emit.larger(largest, before)
    old = emit.exp(emit.broadcast(builder.fsub(before, after)))
    new = emit.exp(emit.broadcast(builder.fsub(largest, after)))

    def joined(earlier_part: Value, part: Value) -> Value:
        return emit.fma(part, new, builder.fmul(earlier_part, old))

    lanes = joined(emit.load(f32x8, earlier_state, _BEFORE_LANES), emit.load(f32x8, state, _LANES))
    emit.store(lanes, earlier_state, _BEFORE_LANES)
    emit.store(after, earlier_state, _BEFORE)
    with emit.loop(num_vectors) as index:
        distance = emit.times(index, 32)
        here = emit.at(earlier, distance)
        emit.store(joined(emit.load(f32x8, here), emit.load(f32x8, emit.at(sums, distance))), here)


def _end(emit: Emitter, state: Value, earlier: Value, out: Value, num_vectors: Value) -> None:
    builder = emit.builder
    share = builder.fdiv(constant(f32, 1.0), emit.sum_of_lanes(emit.load(f32x8, state, _BEFORE_LANES)))
    shares = emit.broadcast(share)
    with emit.loop(num_vectors) as index:
        distance = emit.times(index, 32)
        mixed = builder.fmul(emit.load(f32x8, emit.at(earlier, distance)), shares)
        # A sum may be -0 or 0 by the keys of weight 0 that it was taken past; adding 0 makes both 0.
        emit.store(builder.fadd(mixed, constant(f32x8, 0.0)), emit.at(out, distance))


place_query = micro_kernel("place_query", [INT64] * 4, _place_query)
"""place_query((query, out, stride, head_dim)): the numbers of a query to `out`, `stride` bytes apart."""
begin = micro_kernel("attention_begin", [INT64] * 3, _begin)
"""begin((state, sums, head_dim / 8)): no key of the segment seen yet."""
begin_earlier = micro_kernel("attention_begin_earlier", [INT64] * 3, _begin_earlier)
"""begin_earlier((state, earlier, head_dim / 8)): no segment seen yet."""
join = micro_kernel("attention_join", [INT64] * 5, _join)
"""join((state, sums, state of the earlier, earlier, head_dim / 8)): adds a segment to the ones before it."""
end = micro_kernel("attention_end", [INT64] * 4, _end)
"""end((state, earlier, out, head_dim / 8)): writes the mean of the values, weighted."""


NUM_QUERIES: Final = 8
"""Factor of the cache's type in the number that selects `attend_tile`."""

attend_tile: Final[Any] = select_kernel(
    {
        kind * NUM_QUERIES + queries: MicroKernel(
            f"attend_tile_{queries}_{name}", [INT64] * 11, _Tile(queries, kind).emit
        )
        for name, kind in KV_KINDS.items()
        for queries in _KEY_EIGHTS
    }
)
"""attend_tile(8 * kind + queries, (queries, key list, value list, head_dim, key_stride, start, num_keys, lengths,
state, sums, scores)): adds keys start ... start + num_keys - 1 (at most 64) to the segment of each query.

`kind` is the cache's type, and `queries` 6, 4, 3, 2 or 1. `lengths` are int64, the keys that each query sees, counted
from the sequence's start. The lists of addresses have `LIST_EIGHTS` entries, each of readable memory,
and after the keys' come as many of the next tile, for prefetching. `key_stride` is
the distance in bytes between the numbers of a key.
"""
