"""Tests of `shared.engine.prefill_runner`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shared.domain.errors import ErrorCode
from shared.domain.ids import Attempt, BlockId, RequestId, RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.executor import DecodeRow, PrefillChunk, SampledToken, SequenceFault
from shared.engine.prefill_runner import AddPrompt, ChunkDone, DropPrompt, PrefillRunner, PrefillStep
from shared.kv.block_table import BlockTable
from shared.kv.frame_plan import LayersDone
from shared.kv.layout import KvLayout

FAULT = SequenceFault(ErrorCode.KV_CORRUPT, "as told")


class _Executor:
    """Chunks of 4 tokens; token 1 is 100 + the prompt's length. Notes what it was asked."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[str, int, int]]] = []
        self.released: list[str] = []
        self.faulty: set[str] = set()
        self.refused: set[str] = set()
        self.is_broken = False

    @property
    def layout(self) -> KvLayout:
        return KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8", block_size=4, numerics=b"")

    @property
    def window(self) -> int:
        return 1000

    @property
    def eos_ids(self) -> frozenset[TokenId]:
        return frozenset()

    def chunk_ends(self, key: RequestKey, spec: RequestSpec) -> tuple[int, ...]:
        if key.request_id in self.refused:
            raise FAULT
        return (*range(4, spec.num_prompt_tokens, 4), spec.num_prompt_tokens)

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: Callable[[int], None] | None = None
    ) -> list[SampledToken | SequenceFault | None]:
        self.steps.append([(chunk.key.request_id, chunk.start, chunk.end) for chunk in chunks])
        if on_layers is not None:
            on_layers(1)
        if self.is_broken:
            raise MemoryError
        return [
            FAULT
            if chunk.key.request_id in self.faulty
            else (_sampled(100 + chunk.end) if chunk.is_last and chunk.wants_token else None)
            for chunk in chunks
        ]

    def check_commit(self, key: RequestKey, spec: RequestSpec, block_table: BlockTable) -> None:
        raise NotImplementedError

    def decode(self, rows: Sequence[DecodeRow]) -> list[SampledToken | SequenceFault | None]:
        raise NotImplementedError

    def release(self, key: RequestKey) -> None:
        self.released.append(key.request_id)

    def interrupt(self) -> None:
        raise NotImplementedError


def _sampled(token_id: int) -> SampledToken:
    return SampledToken(token_id=TokenId(token_id))


def _key(name: str) -> RequestKey:
    return RequestKey(RequestId(name), Attempt(1))


def _add(name: str, num_tokens: int) -> AddPrompt:
    spec = RequestSpec(
        request_id=RequestId(name),
        prompt_ids=(TokenId(1),) * num_tokens,
        max_tokens=1,
        sampling=SamplingParams(seed=0),
    )
    return AddPrompt(key=_key(name), spec=spec, block_table=BlockTable((BlockId(0),) * 8, 4))


def _runner(executor: _Executor, *, token_budget: int = 8) -> PrefillRunner:
    return PrefillRunner(executor, token_budget=token_budget, max_sequences=8)


def _step(runner: PrefillRunner) -> PrefillStep:
    report = runner.step()
    assert report is not None
    return report


def test_chunks_share_steps_oldest_first() -> None:
    """Under a budget of 8, two chunks of 4 a step; the third prompt moves up as soon as there is room."""
    executor = _Executor()
    runner = _runner(executor)
    for name, num_tokens in (("a", 10), ("b", 4), ("c", 4)):
        runner.apply(_add(name, num_tokens))

    reports = [_step(runner) for _ in range(3)]

    assert [
        [("a", 0, 4), ("b", 0, 4)],
        [("a", 4, 8), ("c", 0, 4)],
        [("a", 8, 10)],
    ] == executor.steps
    assert [{_key("b"): _sampled(104)}, {_key("c"): _sampled(104)}, {_key("a"): _sampled(110)}] == [
        report.first_tokens for report in reports
    ]
    assert [(2, 8), (2, 8), (1, 2)] == [(report.num_sequences, report.num_tokens) for report in reports]
    assert (
        ChunkDone(key=_key("a"), start=0, end=4, is_last=False),
        ChunkDone(key=_key("b"), start=0, end=4, is_last=True),
    ) == reports[0].chunks
    assert (False, None) == (runner.has_work, runner.step())
    assert ["b", "c", "a"] == executor.released


def test_a_round_in_several_steps_gives_way_between_them() -> None:
    """Each prompt has its chunk a round, small ones share a step, and one that is dropped before its turn costs nothing."""
    executor = _Executor()
    runner = PrefillRunner(executor, token_budget=12, max_sequences=8, step_tokens=4)
    for name, num_tokens in (("a", 10), ("b", 8), ("c", 2), ("d", 2), ("e", 4)):
        runner.apply(_add(name, num_tokens))
    _step(runner)
    runner.apply(DropPrompt(key=_key("b")))
    while runner.has_work:
        _step(runner)

    assert [
        [("a", 0, 4)],
        [("c", 0, 2), ("d", 0, 2)],
        [("a", 4, 8)],
        [("e", 0, 4)],
        [("a", 8, 10)],
    ] == executor.steps


def test_a_chunk_larger_than_the_budget_still_runs() -> None:
    """The oldest prompt always moves on."""
    executor = _Executor()
    runner = _runner(executor, token_budget=1)
    runner.apply(_add("a", 4))

    assert {_key("a"): _sampled(104)} == _step(runner).first_tokens


def test_a_drop_is_answered_before_the_next_step() -> None:
    """The prompt is out, the other goes on; an unknown one is answered as well."""
    executor = _Executor()
    runner = _runner(executor)
    for name in ("a", "b"):
        runner.apply(_add(name, 8))
    _step(runner)
    runner.apply(DropPrompt(key=_key("a")))
    runner.apply(DropPrompt(key=_key("z")))

    answer = runner.acknowledge()

    assert answer is not None
    assert ((_key("a"), _key("z")), 0) == (answer.dropped, answer.num_sequences)
    assert runner.acknowledge() is None
    assert {_key("b"): _sampled(108)} == _step(runner).first_tokens
    assert [("b", 4, 8)] == executor.steps[-1]


def test_a_prompt_that_is_added_twice_runs_once() -> None:
    """A repeated command changes nothing."""
    executor = _Executor()
    runner = _runner(executor)
    runner.apply(_add("a", 8))
    _step(runner)
    runner.apply(_add("a", 8))

    assert {_key("a"): _sampled(108)} == _step(runner).first_tokens
    assert not runner.has_work


def test_a_fault_ends_its_prompt_alone() -> None:
    """The other of the step is as if nothing had been."""
    executor = _Executor()
    executor.faulty = {"a"}
    runner = _runner(executor)
    for name in ("a", "b"):
        runner.apply(_add(name, 8))

    report = _step(runner)

    assert ({_key("a"): FAULT}, 4) == (report.faults, report.num_tokens)
    assert (ChunkDone(key=_key("b"), start=0, end=4, is_last=False),) == report.chunks
    assert [("b", 4, 8)] == (_step(runner), executor.steps[-1])[1]


def test_a_refused_prompt_is_answered_with_its_fault() -> None:
    """It never enters a step."""
    executor = _Executor()
    executor.refused = {"a"}
    runner = _runner(executor)
    runner.apply(_add("a", 8))

    answer = runner.acknowledge()

    assert answer is not None
    assert ({_key("a"): FAULT}, False) == (answer.faults, runner.has_work)


def test_a_broken_step_fails_its_members_only() -> None:
    """Two were in the step; the third, which waited, runs when the executor is well again."""
    executor = _Executor()
    executor.is_broken = True
    runner = _runner(executor)
    for name in ("a", "b", "c"):
        runner.apply(_add(name, 4))

    report = _step(runner)
    executor.is_broken = False
    after = _step(runner)

    assert {_key("a"): ErrorCode.INTERNAL, _key("b"): ErrorCode.INTERNAL} == {
        key: fault.code for key, fault in report.faults.items()
    }
    assert {_key("c"): _sampled(104)} == after.first_tokens


def test_a_cached_start_leaves_the_borders_where_they_are() -> None:
    """With 8 of 14 tokens there already, the first chunk is [8, 12); only what is computed counts."""
    executor = _Executor()
    runner = _runner(executor, token_budget=4)
    runner.apply(replace(_add("a", 14), start=8))

    first, second = _step(runner), _step(runner)

    assert [[("a", 8, 12)], [("a", 12, 14)]] == executor.steps
    assert (4, 2, {_key("a"): _sampled(114)}) == (first.num_tokens, second.num_tokens, second.first_tokens)


def test_layers_are_told_of_every_chunk_of_the_step() -> None:
    """Within the step, with the position that each chunk will end at, and whether it ends its prompt."""
    executor = _Executor()
    told: list[Mapping[RequestKey, LayersDone]] = []
    runner = PrefillRunner(executor, token_budget=8, max_sequences=8, tell_layers=told.append)
    for name, num_tokens in (("a", 10), ("b", 4)):
        runner.apply(_add(name, num_tokens))
    _step(runner)

    assert [
        {
            _key("a"): LayersDone(token_end=4, num_layers=1, is_last=False),
            _key("b"): LayersDone(token_end=4, num_layers=1, is_last=True),
        }
    ] == told


def test_a_continued_answer_samples_nothing() -> None:
    """The prompt is computed and done, without a token 1."""
    runner = _runner(_Executor())
    runner.apply(replace(_add("a", 4), wants_token=False))
    report = _step(runner)

    assert ({}, (_key("a"), True)) == (report.first_tokens, (report.chunks[0].key, report.chunks[0].is_last))
    assert not runner.has_work


def test_there_is_room_until_the_next_step_is_full() -> None:
    """By the chunks that the prompts would give it; without a prompt there is nothing to wait for."""
    runner = _runner(_Executor())
    seen = [runner.has_room()]
    for name in ("a", "b"):
        runner.apply(_add(name, 10))
        seen.append(runner.has_room())

    assert [False, True, False] == seen
