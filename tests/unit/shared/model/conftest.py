"""A tiny Llama model with random weights, as a Hugging Face folder and as GGUF files that say the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from shared.model.prepare import prepare
from shared.model.prepared import PreparedModel
from tests.support.tiny_models import TinyModel, write_gguf, write_hf


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Matrices this small only lose by being shared out, and threads that spin lose most on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    """Two layers, four heads on two kv heads, 259 tokens, window 256, tied head."""
    return TinyModel().build()


@pytest.fixture(scope="session")
def tiny_hf_dir(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Hugging Face folder."""
    return write_hf(tiny_model, tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="session")
def tiny_gguf(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a GGUF file."""
    return write_gguf(tiny_model, tmp_path_factory.mktemp("gguf") / "tiny-F32.gguf")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder that the tests of this package share."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def tiny_dir(tiny_hf_dir: Path, home: Path) -> Path:
    """The prepared folder of the tiny model."""
    return prepare(tiny_hf_dir, home, lambda _: None)


@pytest.fixture(scope="session")
def tiny_q4(tiny_model: Any, home: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """The tiny model with 4-bit weights and an 8-bit head, prepared: every numeric mode is possible."""
    path = tmp_path_factory.mktemp("q4") / "tiny-Q4_1.gguf"
    write_gguf(tiny_model, path, matrix_type=GGMLQuantizationType.Q4_1, top_type=GGMLQuantizationType.Q8_0)
    return PreparedModel.load(prepare(path, home, lambda _: None))
