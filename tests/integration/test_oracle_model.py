"""The first oracle at the model itself: our decoder's greedy answers are those of transformers, token for token."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from cli.main import DEFAULT_HOME
from shared.domain.ids import TokenId
from shared.kv.memory import KvMemory
from shared.model.kernels.cpu.model import CpuModel
from shared.model.model import Model, Segment
from shared.model.numerics import NumericMode
from shared.model.prepare import prepare_mode
from shared.model.prepared import PreparedModel
from shared.model.torch_model import TorchModel
from tests.support.oracle import BORDER_LENGTHS, MAX_TOKENS, STORY, border_questions, questions
from tests.support.reference import Reference, default_model_dir, reference_answers

BLOCK, CHUNK = 16, 64
PACKED_CHUNKS = 4  # a token budget of 256
pytestmark = pytest.mark.timeout(900)  # 40 s of one core; minutes where many share two

Prompt = tuple[TokenId, ...]


class _Sequence:
    """One prompt on its way through the model."""

    def __init__(self, prompt: Prompt, first_block: int) -> None:
        self.prompt = prompt
        num_blocks = -(-(len(prompt) + MAX_TOKENS) // BLOCK)
        self.table: npt.NDArray[np.int64] = np.arange(first_block, first_block + num_blocks)[::-1]
        self.num_computed = 0
        self.answer: list[TokenId] = []
        self.logits: list[bytes] = []
        """The bits of the logits of each token of the answer."""

    def next_segment(self) -> Segment:
        """The next chunk of the prompt, or the last token of the answer."""
        text = (*self.prompt, *self.answer)
        end = min(len(text), self.num_computed + CHUNK)
        ids = text[self.num_computed : end]
        return Segment(token_ids=ids, start=self.num_computed, block_table=self.table, want_logits=end == len(text))


def _answers(model: Model, prompts: Sequence[Prompt], packed: int) -> list[_Sequence]:
    """Greedy answers: prompts in chunks, `packed` prompts a step, then all answers together, one token a step."""
    eos_ids = PreparedModel.load(default_model_dir()).eos_ids
    sequences: list[_Sequence] = []
    for prompt in prompts:
        sequences.append(_Sequence(prompt, sum(len(each.table) for each in sequences)))
    memory = KvMemory(model.layout(BLOCK, "float32"), sum(len(each.table) for each in sequences))

    def step(members: Sequence[_Sequence]) -> None:
        segments = [each.next_segment() for each in members]
        logits = iter(model.forward(memory, segments))
        for member, segment in zip(members, segments, strict=True):
            member.num_computed = segment.end
            if segment.want_logits:
                row = next(logits)
                member.logits.append(row.tobytes())
                member.answer.append(TokenId(int(row.argmax())))

    while waiting := [each for each in sequences if not each.answer][:packed]:
        step(waiting)
    while running := [each for each in sequences if len(each.answer) < MAX_TOKENS and each.answer[-1] not in eos_ids]:
        step(running)
    return sequences


@pytest.fixture(scope="module", params=["cpu", "torch"])
def model(request: pytest.FixtureRequest) -> Model:
    """The default model in float32. One thread on both sides: two that spin are five times slower on a busy machine."""
    prepared = PreparedModel.load(default_model_dir())
    if request.param == "torch":
        return TorchModel.load(prepared, NumericMode.F32, num_threads=1)
    prepare_mode(prepared, NumericMode.F32, DEFAULT_HOME.expanduser(), lambda _: None)
    return CpuModel.load(prepared, NumericMode.F32, 1)


def _share(model: Model, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Every second for the backend that serves (all are asked of the whole system: test_model.py), every fourth for the
    slow reference: both meet each offset from a border.
    """
    return prompts[:: 2 if isinstance(model, CpuModel) else 4]


def test_greedy_answers_are_those_of_transformers(model: Model) -> None:
    """Short, long and Japanese questions and conversations, all decoded in one batch."""
    prompts = [Reference.shared().prompt_ids(question.messages) for question in questions()]
    assert len(prompts) >= 20
    prompts = _share(model, prompts)
    ours = [tuple(each.answer) for each in _answers(model, prompts, PACKED_CHUNKS)]
    assert ours == reference_answers(default_model_dir(), prompts, MAX_TOKENS)


def test_prompts_around_block_and_chunk_borders(model: Model) -> None:
    """One token less, as many, and one more than whole blocks and chunks (PDX-02)."""
    prompts = [Reference.shared().prompt_ids(question.messages) for question in border_questions()]
    assert [len(prompt) for prompt in prompts] == list(BORDER_LENGTHS)
    prompts = _share(model, prompts)
    ours = [tuple(each.answer) for each in _answers(model, prompts, PACKED_CHUNKS)]
    assert ours == reference_answers(default_model_dir(), prompts, MAX_TOKENS)


def test_company_does_not_change_a_bit_of_the_logits(model: Model) -> None:
    """Prompts packed four to a step and answers in one batch, against each of them alone."""
    story = Reference.shared().prompt_ids([{"role": "user", "content": STORY}])
    prompts = [story[:length] for length in (3, 64, 65, 100, 150)]
    together = _answers(model, prompts, PACKED_CHUNKS)
    for prompt, member in zip(prompts, together, strict=True):
        (alone,) = _answers(model, [prompt], 1)
        assert alone.answer == member.answer
        assert alone.logits == member.logits
