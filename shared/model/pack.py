"""The weights of a prepared folder, packed for the `cpu` backend.

The packed file of a weight format holds, as `shared.model.kernels.cpu.packing` lays them out,

    layers.<i>.qkv, .o, .gate_up, .down    the four products, rows of several matrices one after the other
    head, and embedding if it is another matrix: float32, or 8-bit groups in the quantised formats

and in float32 layers.<i>.input_norm, .post_norm, final_norm, and where the model has them .qkv_bias, .q_norm, .k_norm.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.model import weights as names
from shared.model.config import ModelConfig
from shared.model.format_weights import FormatWeights, Matrix
from shared.model.groups import Groups
from shared.model.kernels.cpu.packing import pack_f32, pack_q4, pack_q8
from shared.model.numerics import GROUP, WeightFormat
from shared.model.prepared import PreparationError, PreparedModel
from shared.model.tensor_file import write_tensors


def pack(prepared: PreparedModel, weight_format: WeightFormat, report: Callable[[str], None]) -> None:
    """Write the packed file of a format, if it is not there yet. PreparationError, one sentence, if that cannot be."""
    path = prepared.packed_path(weight_format)
    if path.exists():
        return
    report(f"{prepared.name}: packing weights ({weight_format})")
    weights = FormatWeights.load(prepared, weight_format)
    check_packable(weights.config)
    try:
        write_tensors(path, _packed(weights))
    except ValueError as error:
        raise PreparationError(f"{prepared.name} cannot be packed as {weight_format}: {error}") from None


def check_packable(config: ModelConfig) -> None:
    """Raises PreparationError for sizes that the kernels of the `cpu` backend do not take."""
    for what, size in (
        ("hidden size", config.hidden_size),
        ("intermediate size", config.intermediate_size),
        ("head size", config.head_dim),
    ):
        if size % GROUP:
            raise PreparationError(
                f"a {what} of {size} is no multiple of {GROUP}, so only the torch backend can run this model"
            )


def _packed(weights: FormatWeights) -> dict[str, npt.NDArray[Any]]:
    config = weights.config
    tensors: dict[str, npt.NDArray[Any]] = {}
    for layer in range(config.num_layers):
        source, target = names.layer_prefix(layer), f"layers.{layer}."
        for product, parts in names.PRODUCTS.items():
            tensors[target + product] = _pack_one(weights.matrix(*(f"{source}{part}.weight" for part in parts)))
        tensors[target + "input_norm"] = weights.vector(source + names.INPUT_NORM)
        tensors[target + "post_norm"] = weights.vector(source + names.POST_NORM)
        if config.has_qkv_bias:
            biases = [weights.vector(f"{source}{part}.bias") for part in names.QKV]
            tensors[target + "qkv_bias"] = np.concatenate(biases)
        if config.has_qk_norm:
            tensors[target + "q_norm"] = weights.vector(source + names.Q_NORM)
            tensors[target + "k_norm"] = weights.vector(source + names.K_NORM)
    tensors["final_norm"] = weights.vector(names.FINAL_NORM)
    tensors["head"] = _pack_one(weights.top_matrix(names.head_name(config)))
    if not config.has_tied_head:
        tensors["embedding"] = _pack_one(weights.top_matrix(names.EMBEDDING))
    return tensors


def _pack_one(matrix: Matrix) -> npt.NDArray[np.uint8]:
    if not isinstance(matrix, Groups):
        return pack_f32(matrix)
    if matrix.m is None:
        return pack_q8(matrix.q, matrix.d)
    return pack_q4(matrix.q, matrix.d, matrix.m)
