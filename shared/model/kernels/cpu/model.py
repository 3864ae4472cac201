"""A model on the `cpu` backend: weights mapped from the packed file, memory for a step, and the compiled step."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory
from shared.model.config import ModelConfig
from shared.model.kernels.cpu import linear
from shared.model.kernels.cpu import step as steps
from shared.model.kernels.cpu.attention import scratch_bytes, tile_rows
from shared.model.kernels.cpu.attention_tile import EIGHT
from shared.model.kernels.cpu.kv_write import KV_KINDS
from shared.model.kernels.cpu.packing import padded_outputs
from shared.model.kernels.cpu.team import Team
from shared.model.kernels.cpu.warm import load_kernels
from shared.model.model import Segment, check_segments, model_layout
from shared.model.numerics import NumericMode
from shared.model.prepared import PreparationError, PreparedModel
from shared.model.rope import rotary_table
from shared.model.tensor_file import map_tensors

KERNEL_VERSION = 1
"""Grows with any change that may change a bit of keys, values or logits."""
MAX_ROWS = 128
"""Rows that are computed together; more go in several passes. Two chunks of prefill: longer ones are no faster."""
_LAYER_GROUPS = 6
"""Calls of `on_layers` in a step: each costs the threads a meeting, some 10 us."""
_MODES = {
    NumericMode.F32: linear.F32,
    NumericMode.Q4F32: linear.Q4F32,
    NumericMode.Q4A16: linear.Q4A16,
    NumericMode.Q4A8: linear.Q4A8,
    NumericMode.Q8A16: linear.Q8A16,
}
_COLUMNS = {
    "qkv": steps.QKV,
    "o": steps.OUTPUT,
    "gate_up": steps.GATE_UP,
    "down": steps.DOWN,
    "input_norm": steps.INPUT_NORM,
    "post_norm": steps.POST_NORM,
    "qkv_bias": steps.QKV_BIAS,
    "q_norm": steps.Q_NORM,
    "k_norm": steps.K_NORM,
}
_OPTIONAL = {"qkv_bias", "q_norm", "k_norm"}


def cpu_numerics(mode: NumericMode) -> str:
    """What the bits of this backend depend on beside the weights. AVX2 and portable code give the same bits."""
    return f"cpu kernels {KERNEL_VERSION} {mode}"


class CpuModel:
    """Implements `shared.model.model.Model`. One thread at a time may call `forward`; `close` ends its threads."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, npt.NDArray[Any]],
        *,
        mode: NumericMode,
        source_hash: str,
        num_threads: int = 1,
        max_rows: int = MAX_ROWS,
    ) -> None:
        """`tensors` are those of the packed file; they are used where they lie. KeyError when one is missing."""
        self._config = config
        self._mode = mode
        self._source_hash = source_hash
        self._max_rows = max_rows
        self._tensors = tensors
        self._tile_rows = min(max_rows, tile_rows(config.num_heads // config.num_kv_heads))
        self._step: npt.NDArray[Any] = np.zeros(1, dtype=steps.STEP)
        self._rows: npt.NDArray[np.int64] = np.zeros((steps.ROW_FIELDS, max_rows), dtype=np.int64)
        self._layers = _layer_table(config, tensors)
        self._kept: dict[str, npt.NDArray[Any]] = {}  # arrays whose addresses the step knows
        self._logits: npt.NDArray[np.float32] = np.zeros((0, padded_outputs(config.vocab_size)), dtype=np.float32)
        self._describe_model()
        self._make_memory(num_threads)
        run = load_kernels()
        # Only arrays, no self: the helpers would keep a forgotten model alive.
        step, layers, rows = self._step, self._layers, self._rows
        self._run = run
        self._team = Team(num_threads, lambda address, thread: run(address, step, layers, rows, thread))

    @staticmethod
    def load(prepared: PreparedModel, mode: NumericMode, num_threads: int) -> "CpuModel":
        """Map the packed weights of a prepared folder. PreparationError, one sentence, when it is not usable."""
        path = prepared.packed_path(mode.weight_format)
        if mode not in _MODES:
            raise PreparationError(f"mode {mode} is computed by the torch backend only")
        if not path.exists():
            raise PreparationError(f"{prepared.name} is not prepared for mode {mode}: {path.name} is missing")
        try:
            return CpuModel(
                ModelConfig.from_hf(prepared.config),
                map_tensors(path),
                mode=mode,
                source_hash=prepared.source_hash,
                num_threads=num_threads,
            )
        except (OSError, ValueError, KeyError):
            raise PreparationError(f"{path} is damaged; delete it and prepare again") from None

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def numerics(self) -> str:
        return cpu_numerics(self._mode)

    def layout(self, block_size: int, kv_dtype: str) -> KvLayout:
        layout = model_layout(self._config, self._source_hash, self.numerics, block_size, kv_dtype)
        _check_layout(layout)
        return layout

    def close(self) -> None:
        """End the threads that help; the model cannot compute after it."""
        self._team.close()

    def forward(
        self, memory: KvMemory, segments: Sequence[Segment], on_layers: Callable[[int], None] | None = None
    ) -> npt.NDArray[np.float32]:
        """See `Model.forward`. The logits are a view that the next call overwrites."""
        check_segments(self._config, memory, segments)
        self._describe_cache(memory)
        num_wanted = sum(segment.want_logits for segment in segments)
        if num_wanted > len(self._logits):
            self._logits = np.empty((num_wanted, self._logits.shape[1]), dtype=np.float32)
        tables = [np.ascontiguousarray(segment.block_table, dtype=np.int64) for segment in segments]
        num_left = sum(len(segment.token_ids) for segment in segments)
        step = self._step
        done = row = tile = wanted = 0
        for segment, table in zip(segments, tables, strict=True):
            place = 0
            while place < len(segment.token_ids):
                count = min(len(segment.token_ids) - place, self._max_rows - row)
                tile = self._place_rows(segment, table, place, row, count, tile)
                place += count
                row += count
                if place == len(segment.token_ids) and segment.want_logits:
                    self._rows[steps.WANTED, wanted] = row - 1
                    wanted += 1
                num_left -= count
                if row == self._max_rows or num_left == 0:
                    step["num_rows"], step["num_tiles"], step["num_wanted"] = row, tile, wanted
                    step["logits"] = self._logits.ctypes.data + done * self._logits.strides[0]
                    self._compute(on_layers if num_left == 0 else None)
                    done += wanted
                    row = tile = wanted = 0
        return self._logits[:num_wanted, : self._config.vocab_size]

    def _place_rows(
        self, segment: Segment, table: npt.NDArray[np.int64], place: int, row: int, count: int, tile: int
    ) -> int:
        """Tokens [place, place + count) of a segment as rows from `row` on; returns the number of tiles so far."""
        rows, start = self._rows, segment.start + place
        if count == 1:
            rows[steps.TOKEN, row], rows[steps.POSITION, row] = segment.token_ids[place], start
            rows[steps.TABLE, row] = table.ctypes.data
        else:
            rows[steps.TOKEN, row : row + count] = segment.token_ids[place : place + count]
            rows[steps.POSITION, row : row + count] = np.arange(start, start + count)
            rows[steps.TABLE, row : row + count] = table.ctypes.data
        for first in range(row, row + count, self._tile_rows):
            rows[steps.TILE_FIRST, tile] = first
            rows[steps.TILE_ROWS, tile] = min(self._tile_rows, row + count - first)
            tile += 1
        return tile

    def _compute(self, on_layers: Callable[[int], None] | None) -> None:
        num_layers = self._config.num_layers
        size = num_layers if on_layers is None else -(-num_layers // _LAYER_GROUPS)
        for start in range(0, num_layers, size):
            end = min(num_layers, start + size)
            self._step["layer_start"], self._step["layer_end"] = start, end
            self._run(self._team.address, self._step, self._layers, self._rows, 0)
            if on_layers is not None and end < num_layers:
                on_layers(end)

    def _describe_model(self) -> None:
        config, step, mode = self._config, self._step, _MODES[self._mode]
        tensors = self._tensors
        cosines, sines = rotary_table(config.rope, config.head_dim, config.window)
        self._keep("cosines", np.ascontiguousarray(cosines))
        self._keep("sines", np.ascontiguousarray(sines))
        for name, value in {
            "hidden_size": config.hidden_size,
            "inner_size": config.intermediate_size,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "padded_vocab": padded_outputs(config.vocab_size),
            "num_layers": config.num_layers,
            "mode": mode,
            "head_mode": linear.HEAD_MODES[mode],
            "bits": self._mode.activation_bits or 32,
            "head_bits": self._mode.head_activation_bits or 32,
            "head": tensors["head"].ctypes.data,
            "embedding": tensors.get("embedding", tensors["head"]).ctypes.data,
            "final_norm": tensors["final_norm"].ctypes.data,
            "norm_eps": config.rms_norm_eps,
            "query_factor": config.head_dim**-0.5,
        }.items():
            step[name] = value

    def _make_memory(self, num_threads: int) -> None:
        """All memory of a step but the logits, once."""
        config, step, rows = self._config, self._step, self._max_rows
        group = config.num_heads // config.num_kv_heads
        narrow = max(config.hidden_size, config.attention_size)
        # Activations of any mode fit where float32 ones do.
        for name, width in (("x", config.hidden_size), ("qkv", config.qkv_rows), ("narrow", narrow)):
            self._keep(name, _aligned(rows * width))
        self._keep("inner", _aligned(rows * config.intermediate_size))
        step["narrow_width"] = narrow
        for name, width in (("narrow", narrow), ("inner", config.intermediate_size)):
            self._keep(f"{name}_scale", _aligned(rows * (width // 32)))
            self._keep(f"{name}_sums", _aligned(rows * (width // 32)))
        mixed_bytes = self._tile_rows * group * config.head_dim * 4
        attention = mixed_bytes + scratch_bytes(self._tile_rows * group, config.head_dim)
        bytes_of_thread = max(attention, config.hidden_size * 4, 2 * rows * 32 * 4)
        bytes_of_thread = -(-bytes_of_thread // 4096) * 4096
        self._keep("scratch", _aligned(num_threads * bytes_of_thread // 4))
        step["scratch_bytes"], step["mixed_bytes"] = bytes_of_thread, mixed_bytes
        step["num_threads"] = num_threads

    def _keep(self, name: str, array: npt.NDArray[Any]) -> None:
        self._kept[name] = array
        self._step[name] = array.ctypes.data

    def _describe_cache(self, memory: KvMemory) -> None:
        layout, config = memory.layout, self._config
        _check_layout(layout)
        if (layout.num_layers, layout.num_kv_heads, layout.head_dim) != (
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
        ):
            raise ValueError("the KV cache is of another model")
        step = self._step
        step["kv_kind"] = KV_KINDS[layout.dtype]
        step["cache"] = memory.data.ctypes.data
        step["block_size"], step["block_bytes"] = layout.block_size, layout.block_bytes
        step["layer_bytes"] = layout.layer_block_bytes


def _check_layout(layout: KvLayout) -> None:
    if layout.dtype not in KV_KINDS:
        raise ValueError(f"a KV cache of {layout.dtype} is not supported; supported: {', '.join(KV_KINDS)}")
    if layout.block_size % EIGHT:
        raise ValueError(f"a block size of {layout.block_size} is not supported: it must be a multiple of {EIGHT}")


def _layer_table(config: ModelConfig, tensors: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    """Addresses of the layers' weights; KeyError where one is missing that must be there."""
    table: npt.NDArray[np.int64] = np.zeros((config.num_layers, steps.LAYER_FIELDS), dtype=np.int64)
    for layer in range(config.num_layers):
        for name, column in _COLUMNS.items():
            key = f"layers.{layer}.{name}"
            if name not in _OPTIONAL or key in tensors:
                table[layer, column] = tensors[key].ctypes.data
    return table


def _aligned(num_floats: int) -> npt.NDArray[np.float32]:
    """Zeroed float32 that begin at a multiple of 64 bytes."""
    raw = np.zeros(num_floats + 16, dtype=np.float32)
    start = -raw.ctypes.data % 64 // 4
    return raw[start : start + num_floats]
