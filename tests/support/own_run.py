"""What our own engine answers in one process, one request at a time: the oracle for every numeric mode."""

from collections.abc import Sequence
from functools import cache

from shared.domain.ids import Attempt, BlockId, RequestId, RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.executor import DecodeRow, PrefillChunk, SampledToken, finish_reason
from shared.engine.model_executor import ModelExecutor
from shared.kv.block_table import BlockTable
from shared.kv.memory import KvMemory
from shared.model.kernels.cpu.model import CpuModel
from shared.model.model import Model
from shared.model.numerics import NumericMode
from shared.model.prepared import PreparedModel
from shared.text.chat import ChatMessage, ChatTokenizer
from tests.support.reference import default_model_dir

BLOCK_SIZE = 16


class OwnRun:
    """The default model in one mode, on one thread, with a cache of its own for each request."""

    def __init__(self, mode: NumericMode, *, chunk_tokens: int) -> None:
        prepared = PreparedModel.load(default_model_dir())
        self._model = CpuModel.load(prepared, mode, 1)
        self._prepared = prepared
        self._chunk_tokens = chunk_tokens
        self._chat = ChatTokenizer.load(default_model_dir())

    @staticmethod
    @cache
    def shared(mode: NumericMode, chunk_tokens: int) -> "OwnRun":
        """One for the whole test run."""
        return OwnRun(mode, chunk_tokens=chunk_tokens)

    def answer(self, messages: Sequence[dict[str, str]], max_tokens: int, sampling: SamplingParams) -> tuple[str, int]:
        """Text and number of tokens, an end token included."""
        prompt = self._chat.render([ChatMessage(role=each["role"], content=each["content"]) for each in messages])
        ids = self._token_ids(prompt, max_tokens, sampling)
        detokenizer = self._chat.detokenizer(())
        return detokenizer.feed(ids).text + detokenizer.flush(), len(ids)

    def _token_ids(self, prompt: Sequence[TokenId], max_tokens: int, sampling: SamplingParams) -> tuple[TokenId, ...]:
        spec = RequestSpec(
            request_id=RequestId("alone"), prompt_ids=tuple(prompt), max_tokens=max_tokens, sampling=sampling
        )
        return answer_alone(self._model, self._prepared, spec, chunk_tokens=self._chunk_tokens)


def answer_alone(
    model: Model, prepared: PreparedModel, spec: RequestSpec, *, chunk_tokens: int, kv_dtype: str = "float32"
) -> tuple[TokenId, ...]:
    """The output tokens of a request in a cache of its own, without runners, pools or hand-over."""
    layout = model.layout(BLOCK_SIZE, kv_dtype)
    memory = KvMemory(layout, layout.num_blocks_for(spec.max_total_tokens))
    executor = ModelExecutor(model, memory, window=prepared.window, eos_ids=prepared.eos_ids, chunk_tokens=chunk_tokens)
    key = RequestKey(spec.request_id, Attempt(1))
    table = BlockTable([BlockId(block) for block in range(memory.num_blocks)], BLOCK_SIZE)
    outputs: list[TokenId] = []
    result: object = None
    start = 0
    for end in executor.chunk_ends(key, spec):
        last = end == spec.num_prompt_tokens
        chunk = PrefillChunk(key=key, spec=spec, block_table=table, start=start, end=end, is_last=last)
        (result,) = executor.prefill([chunk])
        start = end
    while True:
        assert isinstance(result, SampledToken)
        outputs.append(result.token_id)
        ended = finish_reason(spec, index=len(outputs), token_id=result.token_id, eos_ids=prepared.eos_ids)
        if ended is not None:
            return tuple(outputs)
        row = DecodeRow(
            key=key,
            spec=spec,
            block_table=table,
            input_tokens=(outputs[-1],),
            index=len(outputs) + 1,
            outputs=tuple(outputs),
        )
        (result,) = executor.decode([row])
