"""Tests of `shared.engine.decode_runner`."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from shared.domain.errors import ErrorCode
from shared.domain.ids import Attempt, BlockId, RequestId, RequestKey, TokenId
from shared.domain.request import FinishReason, RequestSpec
from shared.domain.sampling import SamplingParams, TokenLogprobs
from shared.engine.decode_runner import (
    MAX_REPLAY_TOKENS,
    MAX_REPLAY_TOKENS_ALONE,
    MIN_REPLAY_TOKENS,
    DecodeRunner,
    DecodeSequence,
    DecodeStep,
    Grant,
    Join,
    Leave,
    NewToken,
)
from shared.engine.executor import DecodeRow, PrefillChunk, SampledToken, SequenceFault
from shared.kv.block_table import BlockTable
from shared.kv.layout import KvLayout

FAULT = SequenceFault(ErrorCode.KV_CORRUPT, "as told")
EOS = TokenId(0)
TABLE = BlockTable([BlockId(block) for block in range(30)], 4)


class _Executor:
    """The next token is the fed one + 1; notes what it was asked."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[str, int, int]]] = []
        self.fed: defaultdict[str, list[int]] = defaultdict(list)
        self.outputs: list[tuple[int, ...]] = []
        self.logprobs: TokenLogprobs | None = None
        self.answers_all = False
        self.released: list[str] = []
        self.faulty: set[str] = set()
        self.corrupt: set[str] = set()
        self.ends_at: int | None = None
        self.is_broken = False

    @property
    def layout(self) -> KvLayout:
        return KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8", block_size=4, numerics=b"")

    @property
    def window(self) -> int:
        return 1000

    @property
    def eos_ids(self) -> frozenset[TokenId]:
        return frozenset({EOS})

    def chunk_ends(self, key: RequestKey, spec: RequestSpec) -> tuple[int, ...]:
        raise NotImplementedError

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: Callable[[int], None] | None = None
    ) -> list[SampledToken | SequenceFault | None]:
        raise NotImplementedError

    def check_commit(self, key: RequestKey, spec: RequestSpec, block_table: BlockTable) -> None:
        if key.request_id in self.corrupt:
            raise FAULT

    def decode(self, rows: Sequence[DecodeRow]) -> list[SampledToken | SequenceFault | None]:
        self.steps.append([(row.key.request_id, row.input_tokens[-1], row.index) for row in rows])
        if self.is_broken:
            raise MemoryError
        for row in rows:
            self.fed[row.key.request_id] += row.input_tokens
            self.outputs.append(tuple(row.outputs))
        return [
            FAULT
            if row.key.request_id in self.faulty
            else SampledToken(
                token_id=EOS if row.index == self.ends_at else TokenId(row.input_tokens[-1] + 1),
                logprobs=self.logprobs,
            )
            if row.wants_token or self.answers_all
            else None
            for row in rows
        ]

    def release(self, key: RequestKey) -> None:
        self.released.append(key.request_id)

    def interrupt(self) -> None:
        raise NotImplementedError


def _key(name: str) -> RequestKey:
    return RequestKey(RequestId(name), Attempt(1))


def _join(name: str, *, upto: int = 100, max_tokens: int = 100, ignore_eos: bool = False) -> Join:
    spec = RequestSpec(
        request_id=RequestId(name),
        prompt_ids=(TokenId(1),) * 5,
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=0),
        ignore_eos=ignore_eos,
    )
    return Join(
        sequence=DecodeSequence(
            key=_key(name),
            spec=spec,
            block_table=TABLE,
            outputs=(TokenId(10),),
            may_compute_upto=upto,
        )
    )


def _step(runner: DecodeRunner) -> DecodeStep:
    report = runner.step()
    assert report is not None
    return report


def _token(name: str, index: int, token: int, finish: FinishReason | None = None) -> NewToken:
    return NewToken(key=_key(name), index=index, sampled=SampledToken(token_id=TokenId(token)), finish=finish)


def test_all_sequences_share_every_step() -> None:
    """One that joins between two steps is in the next; each is fed its own last token."""
    executor = _Executor()
    runner = DecodeRunner(executor)
    runner.apply(_join("a"))
    first = _step(runner)
    runner.apply(_join("b"))
    second = _step(runner)

    assert (_token("a", 2, 11),) == first.tokens
    assert (_token("a", 3, 12), _token("b", 2, 11)) == second.tokens
    assert [[("a", 10, 2)], [("a", 11, 3), ("b", 10, 2)]] == executor.steps
    assert [1, 2] == [first.num_sequences, second.num_sequences]


def test_a_join_is_answered_before_the_next_step() -> None:
    """Good KV: joined. Bad KV: a fault, and the sequence is in no step."""
    executor = _Executor()
    executor.corrupt = {"bad"}
    runner = DecodeRunner(executor)
    runner.apply(_join("good"))
    runner.apply(_join("bad"))

    answer = runner.acknowledge()

    assert answer is not None
    assert ((_key("good"),), {_key("bad"): FAULT}, 0) == (answer.joined, answer.faults, answer.num_sequences)
    assert runner.acknowledge() is None
    assert (_token("good", 2, 11),) == _step(runner).tokens
    assert ["bad"] == executor.released


def test_a_token_is_computed_only_when_granted() -> None:
    """Without credit the sequence stays out of the batch and the runner is idle; the credit never falls."""
    executor = _Executor()
    runner = DecodeRunner(executor)
    runner.apply(_join("a", upto=2))
    _step(runner)
    is_idle = not runner.has_work and runner.step() is None
    for upto in (4, 3):
        runner.apply(Grant(key=_key("a"), upto_index=upto, block_table=TABLE))
    indices = [_step(runner).tokens[0].index for _ in range(2)]

    assert (True, [3, 4], False) == (is_idle, indices, runner.has_work)


def test_a_sequence_without_credit_does_not_hold_the_others() -> None:
    """A slow reader costs nobody else a token."""
    executor = _Executor()
    runner = DecodeRunner(executor)
    runner.apply(_join("slow", upto=1))
    runner.apply(_join("fast"))

    assert [[("fast", 10, 2)], [("fast", 11, 3)]] == ([_step(runner), _step(runner)], executor.steps)[1]


def test_a_leave_is_answered_before_the_next_step() -> None:
    """No step uses its blocks afterwards; an unknown key and a grant for it are fine."""
    executor = _Executor()
    runner = DecodeRunner(executor)
    runner.apply(_join("a"))
    runner.apply(_join("b"))
    _step(runner)
    runner.acknowledge()
    for command in (
        Leave(key=_key("a")),
        Leave(key=_key("z")),
        Grant(key=_key("a"), upto_index=999, block_table=TABLE),
    ):
        runner.apply(command)

    answer = runner.acknowledge()

    assert answer is not None
    assert ((_key("a"), _key("z")), ()) == (answer.left, answer.tokens)
    assert (_token("b", 3, 12),) == _step(runner).tokens


@pytest.mark.parametrize(
    ("max_tokens", "ends_at", "ignore_eos", "expected"),
    [
        (3, None, False, [(2, None), (3, FinishReason.LENGTH)]),
        (9, 3, False, [(2, None), (3, FinishReason.STOP)]),
        (4, 3, True, [(2, None), (3, None), (4, FinishReason.LENGTH)]),
        (3, 3, False, [(2, None), (3, FinishReason.STOP)]),
    ],
)
def test_a_finished_sequence_has_left(
    max_tokens: int, ends_at: int | None, ignore_eos: bool, expected: list[tuple[int, FinishReason | None]]
) -> None:
    """By length or end token; then it is out and forgotten, and the runner is idle."""
    executor = _Executor()
    executor.ends_at = ends_at
    runner = DecodeRunner(executor)
    runner.apply(_join("a", max_tokens=max_tokens, ignore_eos=ignore_eos))

    tokens = [_step(runner).tokens[0] for _ in expected]

    assert expected == [(token.index, token.finish) for token in tokens]
    assert (False, ["a"]) == (runner.has_work, executor.released)


def test_a_fault_ends_its_sequence_alone() -> None:
    """The other of the step gets its token."""
    executor = _Executor()
    executor.faulty = {"a"}
    runner = DecodeRunner(executor)
    runner.apply(_join("a"))
    runner.apply(_join("b"))

    report = _step(runner)

    assert ({_key("a"): FAULT}, (_token("b", 2, 11),)) == (report.faults, report.tokens)
    assert [("b", 11, 3)] == (_step(runner), executor.steps[-1])[1]


def test_a_broken_step_fails_its_members() -> None:
    """All rows of the step end; who joins later runs."""
    executor = _Executor()
    executor.is_broken = True
    runner = DecodeRunner(executor)
    runner.apply(_join("a"))
    runner.apply(_join("b"))
    report = _step(runner)
    executor.is_broken = False
    runner.apply(_join("c"))

    assert [ErrorCode.INTERNAL] * 2 == [fault.code for fault in report.faults.values()]
    assert (_token("c", 2, 11),) == _step(runner).tokens


def test_a_second_join_changes_nothing() -> None:
    """The sequence goes on where it is, with the credit that it has."""
    executor = _Executor()
    runner = DecodeRunner(executor)
    runner.apply(_join("a"))
    _step(runner)
    runner.apply(_join("a"))

    assert (_token("a", 3, 12),) == _step(runner).tokens


def _continued(name: str, num_outputs: int, *, num_blocks: int = 30, upto: int = 1000) -> Join:
    """An answer of which the client has tokens 10, 11, 12 …; a prompt of five."""
    join = _join(name, upto=upto, max_tokens=1000)
    outputs = tuple(TokenId(10 + place) for place in range(num_outputs))
    table = BlockTable([BlockId(block) for block in range(num_blocks)], 4)
    return Join(sequence=replace(join.sequence, outputs=outputs, block_table=table))


def test_a_continued_answer_is_replayed_beside_the_others() -> None:
    """Some tokens a step without a result, then the rest with the next token; the other gets a token each step."""
    executor = _Executor()
    runner = DecodeRunner(executor)
    runner.apply(_join("other"))
    runner.apply(_continued("again", MIN_REPLAY_TOKENS + 3))
    steps = [_step(runner) for _ in range(3)]

    last = 10 + MIN_REPLAY_TOKENS + 2
    assert [step.tokens for step in steps] == [
        (_token("other", 2, 11),),
        (_token("other", 3, 12), _token("again", MIN_REPLAY_TOKENS + 4, last + 1)),
        (_token("other", 4, 13), _token("again", MIN_REPLAY_TOKENS + 5, last + 2)),
    ]
    assert executor.fed["again"] == [*range(10, last + 2)]
    assert [step.num_replayed for step in steps] == [MIN_REPLAY_TOKENS, 2, 0]


@pytest.mark.parametrize(
    ("num_others", "num_replayed"),
    [(1, MIN_REPLAY_TOKENS), (4, 4), (7, 7), (16, 16), (20, MAX_REPLAY_TOKENS)],
)
def test_replays_about_double_the_steps_of_the_others(num_others: int, num_replayed: int) -> None:
    """As many tokens as there are others who get one; a few for one alone, and never more than the most."""
    executor = _Executor()
    runner = DecodeRunner(executor)
    for number in range(num_others):
        runner.apply(_join(f"other-{number}"))
    runner.apply(_join("without credit", upto=1))
    runner.apply(_continued("again", 100))
    step = _step(runner)

    assert (num_others, num_replayed) == (len(step.tokens), step.num_replayed)


def test_replays_share_a_bound_in_order_of_joining() -> None:
    """However many come back at once, a step of the other grows by no more than one replay makes it grow."""
    executor = _Executor()
    runner = DecodeRunner(executor)
    runner.apply(_join("other"))
    for name in ("first", "second"):
        runner.apply(_continued(name, MIN_REPLAY_TOKENS + 1))
    _step(runner)
    assert {"other": 1, "first": MIN_REPLAY_TOKENS} == {name: len(fed) for name, fed in executor.fed.items()}
    _step(runner)

    # The first is back with its last output token, which is an ordinary row.
    assert {"other": 2, "first": MIN_REPLAY_TOKENS + 1, "second": MIN_REPLAY_TOKENS} == {
        name: len(fed) for name, fed in executor.fed.items()
    }


def test_a_replay_is_faster_where_nobody_waits() -> None:
    """As many tokens as a prefill chunk; also when the only other one has no credit."""
    executor = _Executor()
    runner = DecodeRunner(executor)
    runner.apply(_join("waiting", upto=1))
    runner.apply(_continued("a", 100))

    assert [MAX_REPLAY_TOKENS_ALONE, 99 - MAX_REPLAY_TOKENS_ALONE] == [_step(runner).num_replayed for _ in range(2)]


def test_nothing_is_fed_without_a_block_for_it() -> None:
    """Five prompt tokens and two blocks of four leave room for three; a longer table lets it go on, a shorter is old."""
    executor = _Executor()
    runner = DecodeRunner(executor)
    runner.apply(_continued("a", 1, num_blocks=2))
    for _ in range(3):
        _step(runner)
    assert not runner.has_work
    assert runner.step() is None
    grown = BlockTable([BlockId(block) for block in range(3)], 4)
    for table in (grown, BlockTable([BlockId(0)], 4)):
        runner.apply(Grant(key=_key("a"), upto_index=0, block_table=table))
    for _ in range(4):
        _step(runner)

    assert not runner.has_work
    assert executor.fed["a"] == [10, 11, 12, 13, 14, 15, 16]


def test_a_replay_needs_no_credit_but_its_end_does() -> None:
    """The client has those tokens; only the next one is his to allow."""
    executor = _Executor()
    runner = DecodeRunner(executor)
    runner.apply(_continued("a", 4, upto=4))
    replayed = _step(runner)
    is_idle = not runner.has_work
    runner.apply(Grant(key=_key("a"), upto_index=5, block_table=TABLE))

    assert ((), 3, True) == (replayed.tokens, replayed.num_replayed, is_idle)
    assert (_token("a", 5, 14),) == _step(runner).tokens


def test_rows_show_the_output_so_far() -> None:
    """What penalties look at; log probabilities pass through."""
    executor = _Executor()
    executor.logprobs = TokenLogprobs(logprob=-0.5)
    runner = DecodeRunner(executor)
    runner.apply(_join("a"))
    tokens = [_step(runner).tokens[0] for _ in range(2)]

    assert [(10,), (10, 11)] == executor.outputs
    assert [executor.logprobs] * 2 == [token.sampled.logprobs for token in tokens]


def test_an_executor_that_answers_where_it_was_not_asked_is_a_bug() -> None:
    """A token for a row that only feeds would be lost."""
    executor = _Executor()
    executor.answers_all = True
    runner = DecodeRunner(executor)
    runner.apply(_continued("a", MAX_REPLAY_TOKENS_ALONE + 2))

    with pytest.raises(RuntimeError, match="did not want"):
        runner.step()
