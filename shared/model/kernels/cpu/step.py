"""A whole step in one piece of compiled code: embedding, layers and head, by all threads of a team at the same time.

A layer is eight phases, each of items that any thread may take (`team`); one phase's results are the next one's input:

    norm            rows                   x of the layer, normed, as activations of the products
    qkv             32 outputs each        queries, keys and values of all rows
    place           rows                   bias, norm and rotation of heads; keys and values into the cache
    attention       tile of rows, kv head  mixed values, as activations
    output          32 outputs each        added to x
    norm            rows
    gate, up        32 outputs each        the gated SiLU of both, as activations
    down            32 outputs each        added to x

The code knows no model: sizes, addresses and the numeric mode are in `STEP`, so one compilation serves all of them.
Activations are float32 [rows][width], or integers [rows][width] with scales and sums [rows][width / 32]: `linear`.
"""

from typing import Any, Final

import numpy as np

from shared.model.kernels.cpu.activation import add_to, silu_times
from shared.model.kernels.cpu.activations import quantise_int8, quantise_int16
from shared.model.kernels.cpu.attention import attend
from shared.model.kernels.cpu.jit import compiled, inlined
from shared.model.kernels.cpu.kv_write import KV_FLOAT32, write_key, write_value
from shared.model.kernels.cpu.linear import F32, linear_range
from shared.model.kernels.cpu.norms import rms_norm
from shared.model.kernels.cpu.rope import rotate_head
from shared.model.kernels.cpu.team import Round, await_done, close_round, first_item, join_round, next_item, open_round
from shared.model.kernels.cpu.weight_rows import read_f32_row, read_q8_row
from shared.model.kernels.cpu.words import load_word

STEP: Final = np.dtype(
    [
        # The model
        ("hidden_size", np.int64),
        ("inner_size", np.int64),
        ("num_heads", np.int64),
        ("num_kv_heads", np.int64),
        ("head_dim", np.int64),
        ("padded_vocab", np.int64),
        ("num_layers", np.int64),
        ("mode", np.int64),
        ("head_mode", np.int64),
        ("bits", np.int64),  # of an activation: 32, 16 or 8
        ("head_bits", np.int64),
        ("embedding", np.int64),  # addresses of packed weights
        ("head", np.int64),
        ("final_norm", np.int64),
        ("cosines", np.int64),  # float32 [window][head_dim / 2]
        ("sines", np.int64),
        ("norm_eps", np.float32),
        ("query_factor", np.float32),
        # The cache
        ("kv_kind", np.int64),
        ("cache", np.int64),
        ("block_size", np.int64),
        ("block_bytes", np.int64),
        ("layer_bytes", np.int64),
        # What is to be done
        ("num_rows", np.int64),
        ("num_tiles", np.int64),
        ("num_wanted", np.int64),
        ("layer_start", np.int64),
        ("layer_end", np.int64),
        ("num_threads", np.int64),
        # Memory of the rows, each address that of row 0
        ("x", np.int64),  # float32 [rows][hidden]
        ("qkv", np.int64),  # float32 [rows][qkv rows]
        ("narrow", np.int64),  # activations [rows][narrow_width]: normed rows and mixed values
        ("narrow_scale", np.int64),
        ("narrow_sums", np.int64),
        ("narrow_width", np.int64),
        ("inner", np.int64),  # activations [rows][inner_size]
        ("inner_scale", np.int64),
        ("inner_sums", np.int64),
        ("logits", np.int64),  # float32 [wanted][padded_vocab]
        ("scratch", np.int64),  # of thread 0; scratch_bytes further on that of thread 1
        ("scratch_bytes", np.int64),
        ("mixed_bytes", np.int64),  # of a thread's scratch, for float32 on their way to activations
    ],
    align=True,
)
"""What a step reads, one record; sizes are counts of numbers unless they end in bytes."""

TOKEN, POSITION, TABLE, WANTED, TILE_FIRST, TILE_ROWS, ROW_FIELDS = range(7)
"""Lines of the int64 array [ROW_FIELDS, rows] that comes with a step: token id, position and address of the block table
of each row; then lists: rows whose logits are wanted, in order; first row and number of rows of each tile of attention,
which is of consecutive tokens of one sequence.
"""

QKV, OUTPUT, GATE_UP, DOWN, INPUT_NORM, POST_NORM, QKV_BIAS, Q_NORM, K_NORM, LAYER_FIELDS = range(10)
"""Columns of the int64 array [layers, LAYER_FIELDS] of addresses; 0 for a weight that the model does not have."""

_GROUP = 32
_OUTPUTS: Final = 32
"""Of an item of a product: two units, 1 to 30 us of work. One group of activations where they are made at once."""
_HEAD_OUTPUTS: Final = 128


@compiled
def _quantise(
    bits: int, source: int, x: int, scale: int, sums: int, width: int, row: int, first: int, count: int
) -> None:
    """The `count` float32 at `source` to the integer activations [row, first ...], in whole groups."""
    place = row * width + first
    of_group = place // _GROUP * 4
    arguments = (source, x + place * bits // 8, scale + of_group, sums + of_group, count // _GROUP)
    if bits == 16:
        quantise_int16(arguments)
    else:
        quantise_int8(arguments)


@compiled
def _norm_row(s: Any, bits: int, source: int, row: int, weight: int, scratch: int) -> None:
    """Row `source` of x, normed, to the activations of `row`."""
    size = s.hidden_size
    out = scratch if bits < 32 else s.narrow + row * s.narrow_width * 4
    rms_norm((s.x + source * size * 4, weight, out, size // 8, np.float32(1) / np.float32(size), s.norm_eps))
    if bits < 32:
        _quantise(bits, scratch, s.narrow, s.narrow_scale, s.narrow_sums, s.narrow_width, row, 0, size)


@compiled
def _rows_of_item(num_rows: int) -> int:
    """Rows that an item takes where a row is little work."""
    return 1 + num_rows // 16


@inlined
def _embed(team: Round, s: Any, rows: Any, begin: int) -> int:
    size = s.hidden_size
    num_items = s.num_rows
    item = first_item(team, begin, num_items)
    while item >= 0:
        arguments = (s.embedding, rows[TOKEN, item], size, s.x + item * size * 4)
        if s.mode == F32:
            read_f32_row(arguments)
        else:
            read_q8_row(arguments)
        item = next_item(team, begin, num_items)
    return await_done(team, begin, num_items)


@inlined
def _norm(team: Round, s: Any, weight: int, scratch: int, begin: int) -> int:
    per_item = _rows_of_item(s.num_rows)
    num_items = (s.num_rows + per_item - 1) // per_item
    item = first_item(team, begin, num_items)
    while item >= 0:
        first = item * per_item
        for row in range(first, min(s.num_rows, first + per_item)):
            _norm_row(s, s.bits, row, row, weight, scratch)
        item = next_item(team, begin, num_items)
    return await_done(team, begin, num_items)


@inlined
def _product(
    team: Round, s: Any, weights: int, k: int, x: int, scale: int, sums: int, width: int, out: int, num_outputs: int,
    accumulate: int, begin: int,
) -> int:  # fmt: skip
    """Activations times weights to `out` [rows][num_outputs], or added to it."""
    num_items = (num_outputs + _OUTPUTS - 1) // _OUTPUTS
    item = first_item(team, begin, num_items)
    while item >= 0:
        first = item * _OUTPUTS
        last = min(num_outputs, first + _OUTPUTS)
        linear_range(
            s.mode,
            (weights, k, x, scale, sums, width, out, num_outputs, s.num_rows, accumulate, first, last),
        )
        item = next_item(team, begin, num_items)
    return await_done(team, begin, num_items)


@compiled
def _place_row(s: Any, rows: Any, layer: int, weights: Any, row: int) -> None:
    """Queries and keys of a row as attention takes them; keys and values to the cache."""
    head_bytes = s.head_dim * 4
    vectors = s.head_dim // 8
    of_row = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
    queries = s.qkv + row * of_row * 4
    keys = queries + s.num_heads * head_bytes
    values = keys + s.num_kv_heads * head_bytes
    position = rows[POSITION, row]
    angles = position * (s.head_dim // 2) * 4
    inverse_size = np.float32(1) / np.float32(s.head_dim)
    if weights[QKV_BIAS] != 0:
        add_to((queries, weights[QKV_BIAS], of_row // 8))
    for head in range(s.num_heads):
        query = queries + head * head_bytes
        if weights[Q_NORM] != 0:
            rms_norm((query, weights[Q_NORM], query, vectors, inverse_size, s.norm_eps))
        rotate_head((query, s.cosines + angles, s.sines + angles, query, s.head_dim // 16, s.query_factor))

    item_bytes = 4 if s.kv_kind == KV_FLOAT32 else 2
    plane_bytes = s.head_dim * s.block_size * item_bytes  # a head's keys or values in a block
    slot = position % s.block_size
    block = load_word(rows[TABLE, row] + 8 * (position // s.block_size))
    target = s.cache + block * s.block_bytes + layer * s.layer_bytes
    for head in range(s.num_kv_heads):
        key = keys + head * head_bytes
        if weights[K_NORM] != 0:
            rms_norm((key, weights[K_NORM], key, vectors, inverse_size, s.norm_eps))
        rotate_head((key, s.cosines + angles, s.sines + angles, key, s.head_dim // 16, np.float32(1)))
        key_at = target + head * plane_bytes + slot * item_bytes
        write_key(s.kv_kind, (key, key_at, s.block_size * item_bytes, vectors))
        value_at = target + (s.num_kv_heads + head) * plane_bytes + slot * s.head_dim * item_bytes
        write_value(s.kv_kind, (values + head * head_bytes, value_at, vectors))


@inlined
def _place(team: Round, s: Any, rows: Any, layer: int, weights: Any, begin: int) -> int:
    per_item = _rows_of_item(s.num_rows)
    num_items = (s.num_rows + per_item - 1) // per_item
    item = first_item(team, begin, num_items)
    while item >= 0:
        first = item * per_item
        for row in range(first, min(s.num_rows, first + per_item)):
            _place_row(s, rows, layer, weights, row)
        item = next_item(team, begin, num_items)
    return await_done(team, begin, num_items)


@inlined
def _attention(team: Round, s: Any, rows: Any, layer: int, scratch: int, begin: int) -> int:
    group = s.num_heads // s.num_kv_heads
    group_size = group * s.head_dim
    query_row_bytes = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim * 4
    item_bytes = 4 if s.kv_kind == KV_FLOAT32 else 2
    plane_bytes = s.head_dim * s.block_size * item_bytes
    num_items = s.num_tiles * s.num_kv_heads
    item = first_item(team, begin, num_items)
    while item >= 0:
        tile = item // s.num_kv_heads
        head = item % s.num_kv_heads
        row = rows[TILE_FIRST, tile]
        num_rows = rows[TILE_ROWS, tile]
        keys = s.cache + layer * s.layer_bytes + head * plane_bytes
        if s.bits < 32:
            out = scratch
            out_stride = group_size * 4
        else:
            out = s.narrow + (row * s.narrow_width + head * group_size) * 4
            out_stride = s.narrow_width * 4
        attend(
            s.kv_kind, keys, keys + s.num_kv_heads * plane_bytes, rows[TABLE, row], s.block_bytes, s.block_size,
            s.qkv + row * query_row_bytes + head * group_size * 4, query_row_bytes, out, out_stride, num_rows, group,
            s.head_dim, rows[POSITION, row], scratch + s.mixed_bytes,
        )  # fmt: skip
        if s.bits < 32:
            for each in range(num_rows):
                _quantise(
                    s.bits, out + each * out_stride, s.narrow, s.narrow_scale, s.narrow_sums, s.narrow_width,
                    row + each, head * group_size, group_size,
                )  # fmt: skip
        item = next_item(team, begin, num_items)
    return await_done(team, begin, num_items)


@inlined
def _gate_up(team: Round, s: Any, weights: int, scratch: int, begin: int) -> int:
    """SiLU(gate) x up as activations: an item makes 32 of each, [rows][32] in its scratch, and one group of them."""
    gates = scratch
    ups = scratch + s.num_rows * _OUTPUTS * 4
    num_items = s.inner_size // _OUTPUTS
    item = first_item(team, begin, num_items)
    while item >= 0:
        first = item * _OUTPUTS
        for half in range(2):
            start = half * s.inner_size + first
            out = (ups if half == 1 else gates) - start * 4
            linear_range(
                s.mode,
                (
                    weights, s.hidden_size, s.narrow, s.narrow_scale, s.narrow_sums, s.narrow_width, out, _OUTPUTS,
                    s.num_rows, 0, start, start + _OUTPUTS,
                ),
            )  # fmt: skip
        for row in range(s.num_rows):
            gate = gates + row * _OUTPUTS * 4
            target = gate if s.bits < 32 else s.inner + (row * s.inner_size + first) * 4
            silu_times((gate, ups + row * _OUTPUTS * 4, target, _OUTPUTS // 8))
            if s.bits < 32:
                _quantise(
                    s.bits, gate, s.inner, s.inner_scale, s.inner_sums, s.inner_size, row, first, _OUTPUTS
                )  # fmt: skip
        item = next_item(team, begin, num_items)
    return await_done(team, begin, num_items)


@inlined
def _head(team: Round, s: Any, rows: Any, scratch: int, begin: int) -> int:
    """Logits of the wanted rows."""
    num_items = s.num_wanted
    item = first_item(team, begin, num_items)
    while item >= 0:
        _norm_row(s, s.head_bits, rows[WANTED, item], item, s.final_norm, scratch)
        item = next_item(team, begin, num_items)
    begin = await_done(team, begin, num_items)
    num_items = (s.padded_vocab + _HEAD_OUTPUTS - 1) // _HEAD_OUTPUTS
    item = first_item(team, begin, num_items)
    while item >= 0:
        first = item * _HEAD_OUTPUTS
        last = min(s.padded_vocab, first + _HEAD_OUTPUTS)
        linear_range(
            s.head_mode,
            (
                s.head, s.hidden_size, s.narrow, s.narrow_scale, s.narrow_sums, s.narrow_width, s.logits,
                s.padded_vocab, s.num_wanted, 0, first, last,
            ),
        )  # fmt: skip
        item = next_item(team, begin, num_items)
    return await_done(team, begin, num_items)


@inlined
def _layer(team: Round, s: Any, rows: Any, layer: int, weights: Any, scratch: int, end: int) -> int:
    hidden, inner, mixed = s.hidden_size, s.inner_size, s.num_heads * s.head_dim
    of_row = mixed + 2 * s.num_kv_heads * s.head_dim
    x, scale, sums, width = s.narrow, s.narrow_scale, s.narrow_sums, s.narrow_width
    end = _norm(team, s, weights[INPUT_NORM], scratch, end)
    end = _product(team, s, weights[QKV], hidden, x, scale, sums, width, s.qkv, of_row, 0, end)
    end = _place(team, s, rows, layer, weights, end)
    end = _attention(team, s, rows, layer, scratch, end)
    end = _product(team, s, weights[OUTPUT], mixed, x, scale, sums, width, s.x, hidden, 1, end)
    end = _norm(team, s, weights[POST_NORM], scratch, end)
    end = _gate_up(team, s, weights[GATE_UP], scratch, end)
    return _product(team, s, weights[DOWN], inner, s.inner, s.inner_scale, s.inner_sums, inner, s.x, hidden, 1, end)


@inlined
def _run_step(team: Round, step: Any, layers: Any, rows: Any, thread: int) -> None:
    """A thread's part: layers [layer_start, layer_end), before the first the embedding, after the last the head."""
    s = step[0]
    scratch = s.scratch + thread * s.scratch_bytes
    end = 0
    if s.layer_start == 0:
        end = _embed(team, s, rows, end)
    for layer in range(s.layer_start, s.layer_end):
        end = _layer(team, s, rows, layer, layers[layer], scratch, end)
    if s.layer_end == s.num_layers and s.num_wanted > 0:
        _head(team, s, rows, scratch, end)


@compiled
def run(team: int, step: Any, layers: Any, rows: Any, thread: int) -> None:
    """Thread 0 leads: computes the step that is described, with its helpers, and returns. Others help until the end.

    `step` is one record of STEP, `layers` and `rows` are as their constants say; all belong to the leader and may
    change between two steps.
    """
    leads = thread == 0
    while True:
        number = open_round(team, step[0].num_threads) if leads else join_round(team)
        if number < 0:
            return
        if number > 0:
            of_thread = (team, number, thread, step[0].num_threads)
            _run_step(of_thread, step, layers, rows, thread)  # in one place: it is inlined, and most of the code
        if leads:
            close_round(team, step[0].num_threads, number)
            return
