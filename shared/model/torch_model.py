"""The reference backend: the decoder in plain torch over the paged cache, on any device and in every numeric mode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional

from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory
from shared.model import weights as names
from shared.model.config import ModelConfig
from shared.model.format_weights import FormatWeights, Matrix
from shared.model.groups import Groups
from shared.model.model import Segment, check_segments, model_layout
from shared.model.numerics import NumericMode
from shared.model.prepared import PreparationError, PreparedModel
from shared.model.rope import rotary_table
from shared.model.torch_cache import StepCache
from shared.model.torch_layers import Linear, as_tensor, attend, make_linear, rotate

KERNEL_VERSION = 2
"""Grows with any change that may change a bit of keys, values or logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class TorchModel:
    """Implements `Model`. In the quantised modes it multiplies in float32 what their kernels multiply in integers.

    That is the same arithmetic (weights d * q + m, activations rounded to integers) but for the rounding of the sums.
    """

    def __init__(self, weights: FormatWeights, *, mode: NumericMode, source_hash: str, device: torch.device) -> None:
        """`weights` are in the format of `mode`."""
        self._config = config = weights.config
        self._device = device
        self._source_hash = source_hash
        self._numerics = torch_numerics(mode, device)
        load = _Loader(weights, mode, device)
        self._embedding = load.table(names.EMBEDDING)
        self._layers = [_layer(config, load, names.layer_prefix(number)) for number in range(config.num_layers)]
        self._norm = load.vector(names.FINAL_NORM)
        self._head = load.head(names.head_name(config))
        cosines, sines = rotary_table(config.rope, config.head_dim, config.window)
        self._cosines, self._sines = as_tensor(cosines).to(device), as_tensor(sines).to(device)

    @staticmethod
    def load(
        prepared: PreparedModel, mode: NumericMode, *, device: str = "cpu", num_threads: int | None = None
    ) -> "TorchModel":
        """Read a prepared folder. Sets torch's thread count for the whole process; None leaves it at all cores.

        Raises PreparationError, one sentence, when the folder is not usable or the device not there.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        chosen = torch_device(device)
        weights = FormatWeights.load(prepared, mode.weight_format)
        with torch.inference_mode():
            return TorchModel(weights, mode=mode, source_hash=prepared.source_hash, device=chosen)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def numerics(self) -> str:
        return self._numerics

    def layout(self, block_size: int, kv_dtype: str) -> KvLayout:
        return model_layout(self._config, self._source_hash, self._numerics, block_size, kv_dtype)

    @torch.inference_mode()
    def forward(
        self, memory: KvMemory, segments: Sequence[Segment], on_layers: Callable[[int], None] | None = None
    ) -> npt.NDArray[np.float32]:
        config = self._config
        check_segments(config, memory, segments)
        cache = StepCache(memory, segments, self._device)
        ids = self._to_device(np.concatenate([np.asarray(each.token_ids, dtype=np.int64) for each in segments]))
        positions = self._to_device(np.concatenate([np.arange(each.start, each.end) for each in segments]))
        cosines, sines = self._cosines[positions].unsqueeze(1), self._sines[positions].unsqueeze(1)

        rows = self._embedding[ids]
        for number, layer in enumerate(self._layers):
            queries = self._write_kv(layer, number, self._normed(rows, layer.input_norm), cosines, sines, cache)
            if on_layers is not None and number + 1 < config.num_layers:
                on_layers(number + 1)
            rows = rows + layer.output(self._attention(queries, number, segments, cache))
            gate, up = layer.gate_up(self._normed(rows, layer.post_norm)).chunk(2, dim=-1)
            rows = rows + layer.down(functional.silu(gate) * up)

        lasts = np.cumsum([len(segment.token_ids) for segment in segments]) - 1
        wanted = lasts[[segment.want_logits for segment in segments]]
        if not len(wanted):
            return np.zeros((0, config.vocab_size), dtype=np.float32)
        return self._head(self._normed(rows[self._to_device(wanted)], self._norm)).cpu().numpy()

    def _write_kv(
        self,
        layer: _Layer,
        number: int,
        normed: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        cache: StepCache,
    ) -> torch.Tensor:
        """Keys and values of all rows into the cache; returns the queries [rows, heads, head_dim]."""
        config = self._config
        product = layer.qkv(normed)
        if layer.qkv_bias is not None:
            product = product + layer.qkv_bias
        heads = product.view(len(normed), -1, config.head_dim)
        queries = heads[:, : config.num_heads]
        keys, values = heads[:, config.num_heads :].chunk(2, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = self._normed(queries, layer.q_norm), self._normed(keys, layer.k_norm)
        cache.write(number, rotate(keys, cosines, sines), values)
        return rotate(queries, cosines, sines)

    def _attention(
        self, queries: torch.Tensor, number: int, segments: Sequence[Segment], cache: StepCache
    ) -> torch.Tensor:
        mixed: list[torch.Tensor] = []
        row = 0
        for place, segment in enumerate(segments):
            keys, values = cache.read(number, place)
            end = row + len(segment.token_ids)
            mixed.append(attend(queries[row:end], keys, values, segment.start, self._config.head_dim**-0.5))
            row = end
        return torch.cat(mixed)

    def _normed(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(values, (values.shape[-1],), weight, self._config.rms_norm_eps)

    def _to_device(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return as_tensor(array).to(self._device)


class _Loader:
    """Weights as tensors on the device: matrices in the mode's type, or as what their groups stand for."""

    def __init__(self, weights: FormatWeights, mode: NumericMode, device: torch.device) -> None:
        self._weights = weights
        self._mode = mode
        self._device = device
        self._type = torch.bfloat16 if mode is NumericMode.BF16 else torch.float32

    def vector(self, name: str) -> torch.Tensor:
        return as_tensor(self._weights.vector(name)).to(self._device)

    def table(self, name: str) -> torch.Tensor:
        return _dequantised(self._weights.top_matrix(name)).to(self._device)

    def product(self, *names_: str) -> Linear:
        matrix = _dequantised(self._weights.matrix(*names_)).to(self._device, self._type)
        return make_linear(matrix, self._mode.activation_bits)

    def head(self, name: str) -> Linear:
        return make_linear(self.table(name).to(self._type), self._mode.head_activation_bits)


def _dequantised(matrix: Matrix) -> torch.Tensor:
    return as_tensor(matrix.dequantised() if isinstance(matrix, Groups) else matrix)


def _layer(config: ModelConfig, load: _Loader, prefix: str) -> _Layer:
    def product(name: str) -> Linear:
        return load.product(*(f"{prefix}{part}.weight" for part in names.PRODUCTS[name]))

    biases = [load.vector(f"{prefix}{part}.bias") for part in names.QKV] if config.has_qkv_bias else None
    return _Layer(
        input_norm=load.vector(prefix + names.INPUT_NORM),
        qkv=product("qkv"),
        qkv_bias=None if biases is None else torch.cat(biases),
        q_norm=load.vector(prefix + names.Q_NORM) if config.has_qk_norm else None,
        k_norm=load.vector(prefix + names.K_NORM) if config.has_qk_norm else None,
        output=product("o"),
        post_norm=load.vector(prefix + names.POST_NORM),
        gate_up=product("gate_up"),
        down=product("down"),
    )


def torch_device(name: str) -> torch.device:
    """Raises PreparationError, one sentence, for a device that is not there."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise PreparationError(f"torch has no device {name!r} here") from None
    return device


def torch_numerics(mode: NumericMode, device: torch.device) -> str:
    """Everything that may change a bit of this backend's results."""
    chip = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else torch.cuda.get_device_name(device)
    packed = device.type == "cpu" and torch.backends.mkldnn.is_available()
    return f"torch-{KERNEL_VERSION} {torch.__version__} {device.type} {chip} packed={packed} {mode}"
