"""Tests of `shared.engine.model_executor`, on a tiny random model."""

import numpy as np
import torch

from shared.domain.ids import Attempt, BlockId, RequestId, RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.executor import DecodeRow, PrefillChunk, SampledToken
from shared.engine.model_executor import ModelExecutor
from shared.engine.sampler import Sampler, SamplingRow
from shared.kv.block_table import BlockTable
from shared.kv.memory import KvMemory
from shared.model.config import ModelConfig, RopeConfig
from shared.model.format_weights import FormatWeights
from shared.model.model import Segment
from shared.model.numerics import NumericMode, WeightFormat
from shared.model.torch_model import TorchModel
from shared.model.weights import expected_shapes

BLOCK_SIZE = 8
CHUNK_TOKENS = 16
NUM_BLOCKS = 64


def _model() -> TorchModel:
    """Two layers, 61 tokens, weights from a fixed seed, so that logits differ widely."""
    config = ModelConfig(
        num_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=61,
        window=256,
        rms_norm_eps=1e-5,
        has_tied_head=True,
        rope=RopeConfig(theta=10_000.0),
    )
    random = np.random.default_rng(5)
    shapes = expected_shapes(config)
    weights = {name: random.normal(scale=0.4, size=shape).astype(np.float32) for name, shape in shapes.items()}
    formatted = FormatWeights(config, WeightFormat.F32, weights, {})
    return TorchModel(formatted, mode=NumericMode.F32, source_hash="tiny", device=torch.device("cpu"))


torch.set_num_threads(1)  # matrices this small only lose by sharing them out
MODEL = _model()


def _executor() -> ModelExecutor:
    memory = KvMemory(MODEL.layout(BLOCK_SIZE, "float32"), NUM_BLOCKS)
    return ModelExecutor(MODEL, memory, window=256, eos_ids=frozenset({TokenId(60)}), chunk_tokens=CHUNK_TOKENS)


def _key(name: str) -> RequestKey:
    return RequestKey(RequestId(name), Attempt(1))


def _spec(name: str, num_prompt_tokens: int, sampling: SamplingParams) -> RequestSpec:
    numbers = np.random.default_rng(num_prompt_tokens).integers(0, 60, num_prompt_tokens)
    return RequestSpec(
        request_id=RequestId(name),
        prompt_ids=tuple(TokenId(int(number)) for number in numbers),
        max_tokens=20,
        sampling=sampling,
    )


def _tables(specs: list[RequestSpec]) -> dict[str, BlockTable]:
    """Blocks of all sequences dealt out in turn, so that none lies in one piece."""
    counts = [-(-spec.max_total_tokens // BLOCK_SIZE) for spec in specs]
    assert sum(counts) <= NUM_BLOCKS
    blocks: dict[str, list[BlockId]] = {spec.request_id: [] for spec in specs}
    next_block = NUM_BLOCKS - 1
    for place in range(max(counts)):
        for spec, count in zip(specs, counts, strict=True):
            if place < count:
                blocks[spec.request_id].append(BlockId(next_block))
                next_block -= 1
    return {name: BlockTable(ids, BLOCK_SIZE) for name, ids in blocks.items()}


def _answers(executor: ModelExecutor, specs: list[RequestSpec]) -> dict[str, list[int]]:
    """All sequences together, 12 tokens each: chunks share steps, then rows do."""
    tables = _tables(specs)
    ends = {spec.request_id: executor.chunk_ends(_key(spec.request_id), spec) for spec in specs}
    answers: dict[str, list[int]] = {}
    for number in range(max(len(each) for each in ends.values())):
        chunks = [
            PrefillChunk(
                key=_key(spec.request_id),
                spec=spec,
                block_table=tables[spec.request_id],
                start=([0, *ends[spec.request_id]])[number],
                end=ends[spec.request_id][number],
                is_last=number == len(ends[spec.request_id]) - 1,
            )
            for spec in specs
            if number < len(ends[spec.request_id])
        ]
        for chunk, result in zip(chunks, executor.prefill(chunks), strict=True):
            assert (result is not None) == chunk.is_last
            if isinstance(result, SampledToken):
                answers[chunk.key.request_id] = [result.token_id]
    for index in range(2, 13):
        rows = [
            DecodeRow(
                key=_key(spec.request_id),
                spec=spec,
                block_table=tables[spec.request_id],
                input_tokens=(TokenId(answers[spec.request_id][-1]),),
                index=index,
                outputs=(),
            )
            for spec in specs
        ]
        for row, result in zip(rows, executor.decode(rows), strict=True):
            assert isinstance(result, SampledToken)
            answers[row.key.request_id].append(result.token_id)
    return answers


def _one_pass(spec: RequestSpec) -> list[int]:
    """The oracle: for each token the whole sequence anew, in one segment, in a fresh cache."""
    tokens = [int(token) for token in spec.prompt_ids]
    table = BlockTable([BlockId(block) for block in range(NUM_BLOCKS)], BLOCK_SIZE)
    for index in range(1, 13):
        memory = KvMemory(MODEL.layout(BLOCK_SIZE, "float32"), NUM_BLOCKS)
        segment = Segment(token_ids=tokens, start=0, block_table=table.indices, want_logits=True)
        row = SamplingRow(key=_key(spec.request_id), spec=spec, index=index, outputs=())
        (sampled,) = Sampler(frozenset()).sample_batch(MODEL.forward(memory, [segment]), [row])
        assert isinstance(sampled, SampledToken)
        tokens.append(sampled.token_id)
    return tokens[spec.num_prompt_tokens :]


def test_chunks_and_steps_give_what_one_pass_gives() -> None:
    """Greedy: prompts around chunk and block borders, cut into chunks and paged, decode as the whole in one piece."""
    specs = [_spec(f"p{length}", length, SamplingParams(temperature=0, seed=0)) for length in (1, 8, 15, 16, 17, 40)]

    assert {spec.request_id: _one_pass(spec) for spec in specs} == _answers(_executor(), specs)


def test_a_seeded_answer_is_the_same_alone_and_in_a_crowd() -> None:
    """Seven others of other lengths, temperatures and seeds share every step; not one token changes."""
    specs = [
        _spec(f"s{seed}", 3 + 6 * seed, SamplingParams(temperature=0.2 * seed, top_p=0.95, top_k=40, seed=seed))
        for seed in range(8)
    ]
    together = _answers(_executor(), specs)
    alone = {spec.request_id: _answers(_executor(), [spec])[spec.request_id] for spec in specs}

    assert alone == together
    assert 8 == len({tuple(answer) for answer in alone.values()})


def test_chunks_end_at_multiples() -> None:
    """Counted from token 0, the last at the prompt's end."""
    executor = _executor()
    ends = [executor.chunk_ends(_key("r"), _spec("r", length, SamplingParams(seed=0))) for length in (1, 16, 17, 40)]

    assert [(1,), (16,), (16, 17), (16, 32, 40)] == ends


def test_facts_of_the_model() -> None:
    """What the worker tells the scheduler."""
    executor = _executor()

    assert (256, frozenset({60}), MODEL.layout(BLOCK_SIZE, "float32")) == (
        executor.window,
        executor.eos_ids,
        executor.layout,
    )
