"""What one session writes of its answer, also while the store is away."""

import asyncio

import pytest

from gateway.answer_log import AnswerLog
from gateway.clients.tokens import TokensArrived
from shared.aio.scope import cancel_and_wait
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, RequestId, TokenId
from shared.domain.logged import LogHead
from shared.domain.request import FinishReason, Outcome, RequestSpec, RequestState
from shared.domain.sampling import SamplingParams
from shared.state.stream_log import LoggedAnswer
from tests.support.fake_stream_log import FakeStreamLog

SPEC = RequestSpec(request_id=RequestId("r"), prompt_ids=(TokenId(1),), max_tokens=9, sampling=SamplingParams(seed=1))
FINISHED = Outcome(state=RequestState.FINISHED, finish_reason=FinishReason.STOP)


class Subject:
    """A log with its store, and how often it was superseded."""

    def __init__(self, store: FakeStreamLog, logged: LoggedAnswer | None = None) -> None:
        self.store = store
        self.num_superseded = 0
        self.secured: list[int] = []
        """Of a thousand tokens, each time that it was told."""
        self.log = AnswerLog(
            store.as_real,
            key_hash="k",
            served=b"s",
            deadline_unix_ms=77,
            logged=logged,
            on_superseded=self._count,
            on_secured=lambda: self.secured.append(self.log.secured(1000)),
        )

    def _count(self) -> None:
        self.num_superseded += 1

    async def append(self, *ids: int, attempt: int = 1, cached: int = 0) -> None:
        """Tokens of an attempt."""
        arrived = TokensArrived(ids=tuple(map(TokenId, ids)), cached_tokens=cached)
        await self.log.append(arrived, attempt=Attempt(attempt))

    @property
    def stored_ids(self) -> tuple[int, ...]:
        return self.store.only.tokens.ids


@pytest.fixture
def store() -> FakeStreamLog:
    """Empty."""
    return FakeStreamLog()


async def test_a_whole_life_is_written(store: FakeStreamLog) -> None:
    """Question first, then tokens by attempt, then the end."""
    subject = Subject(store)
    await subject.log.begin(SPEC)
    assert LogHead(spec=SPEC, key_hash="k", served=b"s", deadline_unix_ms=77) == store.only.head
    assert 1 == store.only.session
    await subject.append(5, 6, cached=16)
    await subject.append(7, attempt=2)
    await subject.log.end(FINISHED)
    stored = store.only
    assert ((5, 6, 7), 16, 2, FINISHED) == (
        stored.tokens.ids, stored.tokens.cached_tokens, stored.tokens.attempt, stored.outcome
    )  # fmt: skip
    assert ([6, 7], []) == subject.log.tokens_behind(1)
    assert (2, False, 0) == (subject.log.last_attempt, subject.log.is_behind, subject.num_superseded)


async def test_a_taken_over_log_goes_on_behind_what_was_there(store: FakeStreamLog) -> None:
    """Under the next number; the older session finds itself superseded by whatever it writes."""
    older = Subject(store)
    await older.log.begin(SPEC)
    await older.append(5)
    newer = Subject(store, await store.take_over(SPEC.request_id, "k"))
    await newer.log.begin(SPEC)
    await newer.append(6)
    assert (2, (5, 6)) == (newer.log.session, subject_ids(newer))
    await older.append(6)
    await older.log.end(FINISHED)
    assert (2, None, (5, 6)) == (older.num_superseded, store.only.outcome, subject_ids(newer))


def subject_ids(subject: Subject) -> tuple[int, ...]:
    """What is stored."""
    return subject.stored_ids


async def test_while_the_store_is_away_nothing_waits_for_it(store: FakeStreamLog) -> None:
    """One call finds out; then tokens are kept here, and all of them are written when it is back."""
    subject = Subject(store)
    await subject.log.begin(SPEC)
    store.is_away = True
    await subject.append(5)
    num_writes = store.num_writes
    await subject.append(6)
    assert (True, num_writes, ()) == (subject.log.is_behind, store.num_writes, subject.stored_ids)
    store.is_away = False
    keeper = asyncio.get_running_loop().create_task(subject.log.keep_whole())
    async with asyncio.timeout(30):
        while subject.log.is_behind:
            await asyncio.sleep(0.01)
    assert (5, 6) == subject.stored_ids
    await cancel_and_wait(keeper)


async def test_a_log_that_another_has_taken_is_not_waited_for(store: FakeStreamLog) -> None:
    """Away, back, and taken over before this one could write what it lacked: it does not try again and again."""
    subject = Subject(store)
    await subject.log.begin(SPEC)
    store.is_away = True
    await subject.append(5)
    store.is_away = False
    await store.take_over(SPEC.request_id, "k")
    keeper = asyncio.get_running_loop().create_task(subject.log.keep_whole())
    async with asyncio.timeout(30):
        while not subject.num_superseded:
            await asyncio.sleep(0.01)
    assert (1, False) == (subject.num_superseded, subject.log.is_behind)
    await cancel_and_wait(keeper)


async def test_a_lost_log_is_written_again_at_once(store: FakeStreamLog) -> None:
    """Found by the next tokens, or by the end."""
    subject = Subject(store)
    await subject.log.begin(SPEC)
    await subject.append(5)
    store.answers.clear()
    await subject.append(6)
    assert (5, 6) == subject.stored_ids
    store.answers.clear()
    await subject.log.end(FINISHED)
    assert ((5, 6), FINISHED) == (subject.stored_ids, store.only.outcome)


async def test_an_end_while_the_store_is_away_is_lost(store: FakeStreamLog) -> None:
    """Nobody waits for it: a later reader learns the end from the scheduler."""
    subject = Subject(store)
    await subject.log.begin(SPEC)
    store.is_away = True
    await subject.log.end(FINISHED)
    assert (None, 0) == (store.only.outcome, subject.num_superseded)


async def test_a_bug_of_the_store_is_not_swallowed(store: FakeStreamLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a store may say is taken for its absence."""

    async def broken(*_: object) -> None:
        raise ServingError(ErrorCode.INTERNAL, "bug")

    subject = Subject(store)
    await subject.log.begin(SPEC)
    monkeypatch.setattr(store, "append", broken)
    with pytest.raises(ServingError, match="bug"):
        await subject.append(5)
