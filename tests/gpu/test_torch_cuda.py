"""The torch backend on a CUDA device: the same answers as on the CPU, and a row's bits the same in any company."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from shared.kv.memory import KvMemory
from shared.model.model import Segment
from shared.model.numerics import NumericMode
from shared.model.prepare import prepare
from shared.model.prepared import PreparedModel
from shared.model.torch_model import TorchModel
from tests.support.greedy import greedy_answers
from tests.support.tiny_models import VOCAB_SIZE, TinyModel, write_gguf

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here, or torch has no CUDA"),
    pytest.mark.timeout(300),
]

FAMILIES = [
    TinyModel(),
    TinyModel(model_type="qwen2", num_heads=6, is_tied=False),
    TinyModel(model_type="qwen3", num_heads=3, num_kv_heads=1, head_dim=128),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.model_type)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """A tiny model with 4-bit weights: every mode is possible."""
    home = tmp_path_factory.mktemp("home")
    path = write_gguf(
        request.param.build(),
        home / "tiny.gguf",
        matrix_type=GGMLQuantizationType.Q4_1,
        top_type=GGMLQuantizationType.Q8_0,
    )
    return PreparedModel.load(prepare(path, home, lambda _: None))


def _prompts() -> list[list[int]]:
    return [np.random.default_rng(length).integers(0, VOCAB_SIZE, length).tolist() for length in (1, 16, 33, 70)]


@pytest.mark.parametrize("mode", [NumericMode.F32, NumericMode.Q4A16])
def test_answers_are_those_of_the_cpu(prepared: PreparedModel, mode: NumericMode) -> None:
    """Greedy, token for token; the fingerprints still differ, for the bits do."""
    cpu, cuda = (TorchModel.load(prepared, mode, device=device) for device in ("cpu", "cuda"))

    assert greedy_answers(cpu, _prompts(), 16) == greedy_answers(cuda, _prompts(), 16)
    assert cpu.layout(16, "float32").fingerprint != cuda.layout(16, "float32").fingerprint


@pytest.mark.parametrize("mode", list(NumericMode))
def test_company_and_chunks_do_not_change_a_bit(prepared: PreparedModel, mode: NumericMode) -> None:
    """Keys, values and logits of four texts: alone and whole, together in chunks, together token by token."""
    model = TorchModel.load(prepared, mode, device="cuda")
    tables = [np.arange(5 * number, 5 * number + 5) for number in range(4)]
    results: list[bytes] = []
    for size, groups in ((70, [[0], [1], [2], [3]]), (16, [[3, 1, 0, 2]]), (1, [[0, 1, 2, 3]])):
        memory = KvMemory(model.layout(16, "float16"), 20)
        logits: dict[int, bytes] = {}
        for group in groups:
            for start in range(0, 70, size):
                members = [each for each in group if start < len(_prompts()[each])]
                segments = [
                    Segment(
                        token_ids=_prompts()[each][start : start + size],
                        start=start,
                        block_table=tables[each],
                        want_logits=True,
                    )
                    for each in members
                ]
                if segments:
                    rows = model.forward(memory, segments)
                    logits |= {each: row.tobytes() for each, row in zip(members, rows, strict=True)}
        results.append(b"".join(logits[each] for each in range(4)) + memory.data.tobytes())

    assert results[0] == results[1] == results[2]
