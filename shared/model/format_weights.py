"""The weights of a model in the format that a numeric mode computes with."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy

from shared.model.config import ModelConfig
from shared.model.groups import Groups, quantised
from shared.model.numerics import WeightFormat
from shared.model.prepared import PreparationError, PreparedModel
from shared.model.weights import check_weights

Matrix = npt.NDArray[np.float32] | Groups


class FormatWeights:
    """Float32 vectors, and matrices as float32 or as groups, by their Hugging Face names."""

    def __init__(
        self,
        config: ModelConfig,
        weight_format: WeightFormat,
        weights: Mapping[str, npt.NDArray[np.float32]],
        groups: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        """`weights` are the source's in float32; `groups` are the tensors of its groups, needed for Q4 alone."""
        self.config = config
        self._format = weight_format
        self._weights = weights
        self._groups = groups

    @staticmethod
    def load(prepared: PreparedModel, weight_format: WeightFormat) -> "FormatWeights":
        """Reads the files of a prepared folder.

        Raises PreparationError, one sentence, when the folder is damaged or the model cannot have this format.
        """
        config = ModelConfig.from_hf(prepared.config)
        try:
            weights: dict[str, npt.NDArray[np.float32]] = cast("Any", safetensors_numpy).load_file(
                prepared.weights_path
            )
            check_weights(config, {name: value.shape for name, value in weights.items()})
        except (OSError, SafetensorError, PreparationError):
            raise PreparationError(
                f"{prepared.weights_path} is missing or damaged; delete the folder and prepare again"
            ) from None
        groups: dict[str, npt.NDArray[Any]] = {}
        if weight_format is WeightFormat.Q4:
            if not prepared.groups_path.exists():
                raise PreparationError(
                    f"{prepared.name} has no 4-bit weights of type Q4_0 or Q4_1, so no q4 mode; choose f32 or q8a16"
                )
            try:
                groups = cast("Any", safetensors_numpy).load_file(prepared.groups_path)
            except (OSError, SafetensorError):
                raise PreparationError(
                    f"{prepared.groups_path} is damaged; delete the folder and prepare again"
                ) from None
        return FormatWeights(config, weight_format, weights, groups)

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A norm or a bias."""
        return self._weights[name]

    def matrix(self, *of: str) -> Matrix:
        """The rows of the named matrices of layers, one after the other."""
        if self._format is WeightFormat.Q4:
            return Groups.joined([Groups.from_tensors(self._groups, name) for name in of])
        joined = np.concatenate([self._weights[name] for name in of])
        return quantised(joined) if self._format is WeightFormat.Q8 else joined

    def top_matrix(self, name: str) -> Matrix:
        """Embedding or head: never less than 8 bits."""
        if self._format not in (WeightFormat.Q4, WeightFormat.Q8):
            return self._weights[name]
        if f"{name}.q" in self._groups:
            return Groups.from_tensors(self._groups, name)
        return quantised(self._weights[name])
