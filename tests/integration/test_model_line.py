"""Every family through both runners, pools and prefix indexes: each answer is the one that the request has alone.

The second oracle at tiny random models, and in float32 the first one as well. Prompts of all lengths from one token to
three blocks and one, and around the borders of chunks; batches of 1 to 16; greedy and drawn side by side; cold and from
cached blocks; in two orders; with sequences that leave the batch at any moment and come back by replay.
"""

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch

from shared.domain.ids import RequestId, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.model.kernels.cpu.model import CpuModel
from shared.model.numerics import NumericMode
from shared.model.prepare import prepare, prepare_mode
from shared.model.prepared import PreparedModel
from tests.support.model_line import BLOCK_SIZE, CHUNK, ModelLine
from tests.support.own_run import answer_alone
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, write_hf
from tests.support.torch_threads import one_torch_thread

pytestmark = pytest.mark.timeout(900)  # the first run on a machine compiles the kernels

LENGTHS = (*range(1, 3 * BLOCK_SIZE + 2), 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK - 1, 3 * CHUNK + 1)
NUM_BLOCKS = 160  # fewer than 24 of the longest need: some wait for others' ends
LADDER = 16  # requests whose ends are two steps apart: together they are a batch of every size down to one
GREEDY = SamplingParams(temperature=0.0, seed=0)


def _prompt(number: int, length: int) -> tuple[TokenId, ...]:
    """One of three texts, so far: whoever is longer finds the blocks of the shorter ones."""
    ids: list[int] = np.random.default_rng(number % 3).integers(0, VOCAB_SIZE, max(LENGTHS)).tolist()
    return tuple(map(TokenId, ids[:length]))


def _specs() -> list[RequestSpec]:
    """Answers of 1 to 34 tokens, every other one drawn, with whatever looks at the logits or back at the answer."""
    specs: list[RequestSpec] = []
    for number, length in enumerate(LENGTHS):
        drawn = SamplingParams(
            temperature=1.1, top_p=0.95, top_k=100, min_p=0.001, seed=number,
            presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.2,
        )  # fmt: skip
        specs.append(
            RequestSpec(
                request_id=RequestId(f"r{number}"),
                prompt_ids=_prompt(number, length),
                max_tokens=4 + 2 * number if number < LADDER else 1 + number % 17,
                sampling=drawn if number % 2 else GREEDY,
                ignore_eos=True,
            )
        )
    return specs


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Generator[None]:
    """Matrices this small only lose by being shared out, and threads that spin lose most on a busy machine."""
    with one_torch_thread():
        yield


@pytest.fixture(scope="module", params=list(FAMILIES))
def reference(request: pytest.FixtureRequest) -> Any:
    """The model in transformers."""
    return FAMILIES[request.param].build()


@pytest.fixture(scope="module")
def prepared(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """It as a prepared folder, ready for two modes."""
    home = tmp_path_factory.mktemp("home")
    prepared = PreparedModel.load(prepare(write_hf(reference, home / "tiny"), home, lambda _: None))
    for mode in (NumericMode.F32, NumericMode.Q8A16):
        prepare_mode(prepared, mode, home, lambda _: None)
    return prepared


@pytest.mark.parametrize(("mode", "kv_dtype"), [(NumericMode.F32, "float32"), (NumericMode.Q8A16, "float16")])
def test_a_crowd_gets_the_answers_of_each_alone(
    reference: Any, prepared: PreparedModel, mode: NumericMode, kv_dtype: str
) -> None:
    """Cold, then warm in another order and in smaller batches; in float32 the greedy ones are those of transformers."""
    model = CpuModel.load(prepared, mode, 1)
    specs = _specs()
    expected = [answer_alone(model, prepared, spec, chunk_tokens=CHUNK, kv_dtype=kv_dtype) for spec in specs]
    line = ModelLine(model, prepared, kv_dtype=kv_dtype, num_blocks=NUM_BLOCKS)

    assert expected == line.answers(specs, at_once=24, seed=1, leaves=0.3)
    num_cached = line.num_cached
    assert expected == line.answers(specs, at_once=5, seed=2, leaves=0.3)
    assert expected[:LADDER] == line.answers(specs[:LADDER], at_once=LADDER, seed=3, leaves=0.0)
    model.close()
    assert line.num_cached > num_cached > 0
    assert line.num_held > 0
    assert line.num_replayed > 0
    assert set(range(1, LADDER + 1)) <= line.batch_sizes
    if mode is NumericMode.F32:
        greedy = [(spec, answer) for spec, answer in zip(specs, expected, strict=True) if spec.sampling is GREEDY]
        assert [spec.request_id for spec, answer in greedy if not _is_greedy(reference, spec, answer)] == []


def _is_greedy(reference: Any, spec: RequestSpec, answer: tuple[int, ...]) -> bool:
    """Whether each token is the likeliest after all before it: then it is what transformers generates."""
    with torch.inference_mode():
        logits = reference(torch.tensor([(*spec.prompt_ids, *answer[:-1])])).logits[0]
    return tuple(logits[spec.num_prompt_tokens - 1 :].argmax(dim=-1).tolist()) == answer
