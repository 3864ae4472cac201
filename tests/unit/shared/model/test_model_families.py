"""Every family, from every kind of source and on both backends: the greedy answers of transformers, token for token."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors import numpy as safetensors_numpy

from shared.model.kernels.cpu.model import CpuModel
from shared.model.numerics import NumericMode
from shared.model.prepare import prepare, prepare_mode
from shared.model.prepared import PreparedModel
from shared.model.torch_model import TorchModel
from tests.support.greedy import greedy_answers
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, write_gguf, write_hf

pytestmark = pytest.mark.timeout(300)  # the first run on a machine compiles the kernels

NUM_TOKENS = 16
PROMPT_LENGTHS = (1, 15, 16, 17, 33, 65)  # around blocks of 16 and chunks of 32


@pytest.fixture(scope="module", params=list(FAMILIES))
def reference(request: pytest.FixtureRequest) -> Any:
    """The model in transformers."""
    return FAMILIES[request.param].build()


@pytest.fixture(scope="module")
def prepared(reference: Any, home: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """It as a prepared folder."""
    folder = write_hf(reference, tmp_path_factory.mktemp("family") / "whole")
    return PreparedModel.load(prepare(folder, home, lambda _: None))


@pytest.fixture(scope="module")
def prepared_gguf(reference: Any, home: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """The same from a GGUF file."""
    file = write_gguf(reference, tmp_path_factory.mktemp("family") / "whole.gguf")
    return PreparedModel.load(prepare(file, home, lambda _: None))


@pytest.fixture(scope="module")
def questions() -> list[list[int]]:
    """Prompts around the borders of blocks and chunks."""
    random = np.random.default_rng(2)
    return [random.integers(0, VOCAB_SIZE, length).tolist() for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def expected(reference: Any, questions: list[list[int]]) -> list[list[int]]:
    """What transformers answers."""
    return [_generate(reference, question) for question in questions]


def _weights(prepared: PreparedModel) -> dict[str, bytes]:
    loaded = cast("Any", safetensors_numpy).load_file(prepared.weights_path)
    return {name: value.tobytes() for name, value in loaded.items()}


def test_every_source_gives_the_same_weights(
    reference: Any, prepared: PreparedModel, prepared_gguf: PreparedModel, home: Path, tmp_path: Path
) -> None:
    """One file, shards, and GGUF, whose names and order of rows are others; and the same rotary positions."""
    sharded = write_hf(reference, tmp_path / "sharded", max_shard_size="300KB")
    others = [PreparedModel.load(prepare(sharded, home, lambda _: None)), prepared_gguf]

    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    for other in others:
        assert _weights(other) == _weights(prepared)
        assert (prepared.window, prepared.eos_ids) == (other.window, other.eos_ids)


@pytest.mark.parametrize("source", ["folder", "gguf"])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_greedy_answers_are_those_of_transformers(
    expected: list[list[int]],
    questions: list[list[int]],
    prepared: PreparedModel,
    prepared_gguf: PreparedModel,
    backend: str,
    source: str,
    home: Path,
) -> None:
    """All answers in one batch, in float32."""
    folder = prepared_gguf if source == "gguf" else prepared
    if backend == "cpu":
        prepare_mode(folder, NumericMode.F32, home, lambda _: None)
        model = CpuModel.load(folder, NumericMode.F32, 1)
    else:
        model = TorchModel.load(folder, NumericMode.F32, num_threads=1)

    assert expected == greedy_answers(model, questions, NUM_TOKENS, chunk=32)


def _generate(reference: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=NUM_TOKENS,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=VOCAB_SIZE,  # none: answers of one length
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()
