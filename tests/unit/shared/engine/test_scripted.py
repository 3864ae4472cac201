"""Tests of `shared.engine.scripted`."""

import json
import threading
import time

import numpy as np
import pytest

from shared.domain.errors import ErrorCode
from shared.domain.ids import Attempt, BlockId, RequestId, RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.executor import DecodeRow, PrefillChunk, SampledToken, SequenceFault
from shared.engine.kv_digest import digest_layout, digest_words
from shared.engine.scripted import NUM_CHECKED_BLOCKS, ScriptedExecutor
from shared.kv.block_table import BlockTable
from shared.kv.memory import KvMemory
from shared.text.script import SCRIPTED_EOS_ID

BLOCK_SIZE = 16
A, B = TokenId(256), TokenId(257)


class _StillClock:
    """Time stands still: a step that wants to last 5 s waits for 5 s of real time, unless interrupted."""

    def monotonic(self) -> float:
        return 100.0

    def unix_ms(self) -> int:
        return 0


def _key(name: str = "r") -> RequestKey:
    return RequestKey(RequestId(name), Attempt(1))


def _spec(script: dict[str, object], *, salt: int = 0) -> RequestSpec:
    return RequestSpec(
        request_id=RequestId("r"),
        prompt_ids=tuple(TokenId(byte) for byte in json.dumps(script).encode()),
        max_tokens=500,
        sampling=SamplingParams(seed=0),
        kv_salt=salt,
    )


def _table(spec: RequestSpec, first: int = 0) -> BlockTable:
    count = -(-spec.max_total_tokens // BLOCK_SIZE)
    return BlockTable(tuple(BlockId(first + count - place) for place in range(count)), BLOCK_SIZE)


def _executor(num_blocks: int = 512) -> tuple[ScriptedExecutor, KvMemory]:
    memory = KvMemory(digest_layout(BLOCK_SIZE), num_blocks)
    return ScriptedExecutor(memory, chunk_tokens=64, clock=_StillClock()), memory


def _prefill(executor: ScriptedExecutor, key: RequestKey, spec: RequestSpec, table: BlockTable) -> object:
    """All chunks of one prompt; the last one's result, as a bare token."""
    ends = executor.chunk_ends(key, spec)
    result: SampledToken | SequenceFault | None = None
    for number, (start, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True), start=1):
        is_last = number == len(ends)
        chunk = PrefillChunk(key=key, spec=spec, block_table=table, start=start, end=end, is_last=is_last)
        (result,) = executor.prefill([chunk])
    return _bare(result)


def test_half_of_the_layers_are_there_when_they_are_told() -> None:
    """The others are written when the step ends; then everything is as without anyone who listens."""
    executor, memory = _executor()
    silent, expected = _executor()
    key, spec = _key(), _spec({"pieces": ["a"]})
    table = _table(spec)
    _prefill(silent, key, spec, table)
    (end,) = executor.chunk_ends(key, spec)
    chunk = PrefillChunk(key=key, spec=spec, block_table=table, start=0, end=end, is_last=True)
    seen: list[tuple[int, bool, bool]] = []

    def on_layers(num_layers: int) -> None:
        are, wanted = digest_words(memory), digest_words(expected)
        early = np.array_equal(are[:, :num_layers], wanted[:, :num_layers])
        seen.append((num_layers, early, bool(are[:, num_layers:].any())))

    executor.prefill([chunk], on_layers)

    assert [(2, True, False)] == seen
    assert np.array_equal(expected.data, memory.data)


def _bare(result: SampledToken | SequenceFault | None) -> object:
    return result.token_id if isinstance(result, SampledToken) else result


def _row(key: RequestKey, spec: RequestSpec, table: BlockTable, fed: TokenId, index: int) -> DecodeRow:
    return DecodeRow(key=key, spec=spec, block_table=table, input_tokens=(fed,), index=index, outputs=())


def _joined(
    script: dict[str, object], *, name: str = "r", salt: int = 0
) -> tuple[ScriptedExecutor, KvMemory, DecodeRow]:
    """A sequence that is ready to decode token 2."""
    executor, memory = _executor()
    key, spec = _key(name), _spec(script, salt=salt)
    table = _table(spec)
    token = _prefill(executor, key, spec, table)
    assert isinstance(token, int)
    executor.check_commit(key, spec, table)
    return executor, memory, _row(key, spec, table, TokenId(token), 2)


def _next(row: DecodeRow, token: object) -> DecodeRow:
    assert isinstance(token, int)
    return _row(row.key, row.spec, row.block_table, TokenId(token), row.index + 1)


def _play(executor: ScriptedExecutor, row: DecodeRow, count: int) -> list[object]:
    results: list[object] = []
    for _ in range(count):
        (result,) = executor.decode([row])
        results.append(_bare(result))
        if isinstance(result, SequenceFault):
            break
        row = _next(row, _bare(result))
    return results


def test_the_script_is_played_and_ended() -> None:
    """Two pieces twice, then end tokens; token 1 comes from prefill."""
    executor, _, row = _joined({"pieces": ["a", "b"], "repeat": 2})

    assert (A,) == row.input_tokens
    assert [B, A, B, SCRIPTED_EOS_ID, SCRIPTED_EOS_ID] == _play(executor, row, 5)


def test_without_end_the_script_goes_round() -> None:
    """`eos` false: the pieces again and again, until someone else ends it."""
    executor, _, row = _joined({"pieces": ["a", "b"], "eos": False})

    assert [B, A, B, A, B] == _play(executor, row, 5)


@pytest.mark.parametrize("fail_at", [2, 4])
def test_fail_at_fails_that_token(fail_at: int) -> None:
    """Tokens before it are good."""
    executor, _, row = _joined({"pieces": ["a"], "repeat": 9, "fail_at": fail_at})

    results = _play(executor, row, 9)

    assert fail_at - 1 == len(results)
    assert isinstance(results[-1], SequenceFault)
    assert ErrorCode.INTERNAL is results[-1].code


def test_fail_at_one_fails_in_prefill() -> None:
    """Token 1 is made there."""
    executor, _ = _executor()
    spec = _spec({"pieces": ["a"], "fail_at": 1})

    assert isinstance(_prefill(executor, _key(), spec, _table(spec)), SequenceFault)


def test_a_fault_does_not_disturb_the_others() -> None:
    """One row fails, one has rotten KV, the third gets its token and its fed token is written."""
    executor, memory = _executor()
    rows: list[DecodeRow] = []
    for place, fail_at in enumerate((2, None, None)):
        key, spec = _key(str(place)), _spec({"pieces": ["a", "b"], "fail_at": fail_at})
        table = _table(spec, first=50 * place)
        _prefill(executor, key, spec, table)
        executor.check_commit(key, spec, table)
        rows.append(_row(key, spec, table, A, 2))
    digest_words(memory)[rows[1].block_table.block_ids[0], 2, 1, 5] ^= np.uint64(1)

    first, second, third = executor.decode(rows)

    assert isinstance(first, SequenceFault)
    assert isinstance(second, SequenceFault)
    assert [ErrorCode.INTERNAL, ErrorCode.KV_CORRUPT] == [first.code, second.code]
    assert third == SampledToken(token_id=B)
    slot = rows[2].block_table.slot_of(rows[2].position)
    assert digest_words(memory)[slot // BLOCK_SIZE, :, :, slot % BLOCK_SIZE].all()


@pytest.mark.parametrize(("layer", "half", "slot"), [(0, 0, 0), (3, 1, 15), (2, 0, 7)])
def test_commit_finds_any_wrong_word(layer: int, half: int, slot: int) -> None:
    """One flipped bit in any layer, half and slot of a prompt block."""
    executor, memory = _executor()
    spec = _spec({"pieces": ["a"]})
    table = _table(spec)
    _prefill(executor, _key(), spec, table)
    digest_words(memory)[table.block_ids[0], layer, half, slot] ^= np.uint64(1 << 63)

    with pytest.raises(SequenceFault) as caught:
        executor.check_commit(_key(), spec, table)
    assert ErrorCode.KV_CORRUPT is caught.value.code


def test_commit_finds_what_lies_beyond_the_prompt() -> None:
    """The last block must be zero there: otherwise the frame was not what prefill sends."""
    executor, memory = _executor()
    spec = _spec({"pieces": ["a"]})
    table = _table(spec)
    assert spec.num_prompt_tokens % BLOCK_SIZE
    _prefill(executor, _key(), spec, table)
    slot = table.slot_of(spec.num_prompt_tokens)
    digest_words(memory)[slot // BLOCK_SIZE, 0, 0, slot % BLOCK_SIZE] = 1

    with pytest.raises(SequenceFault):
        executor.check_commit(_key(), spec, table)


def test_commit_finds_the_kv_of_another_salt() -> None:
    """Equal prompts of different tenants have different KV."""
    executor, _ = _executor()
    spec = _spec({"pieces": ["a"]}, salt=1)
    table = _table(spec)
    _prefill(executor, _key(), spec, table)

    with pytest.raises(SequenceFault):
        executor.check_commit(_key(), _spec({"pieces": ["a"]}, salt=2), table)


def test_every_block_of_a_long_context_is_checked_in_turn() -> None:
    """A bit that rots in any block while decoding is found within a round of the rotation."""
    script: dict[str, object] = {"pieces": ["a" * 300], "repeat": 400}
    num_blocks = -(-len(json.dumps(script)) // BLOCK_SIZE)
    assert num_blocks > 2 * NUM_CHECKED_BLOCKS
    found = 0
    for block in range(num_blocks):
        executor, memory, row = _joined(script)
        digest_words(memory)[row.block_table.block_ids[block], 0, 0, 0] ^= np.uint64(1)
        results = _play(executor, row, num_blocks // NUM_CHECKED_BLOCKS + 1)
        found += isinstance(results[-1], SequenceFault)

    assert num_blocks == found


def test_a_wrong_generated_token_is_found() -> None:
    """The KV of generated tokens is checked like the prompt's."""
    executor, memory, row = _joined({"pieces": ["a"], "repeat": 99})
    (token,) = executor.decode([row])
    slot = row.block_table.slot_of(row.position)
    digest_words(memory)[slot // BLOCK_SIZE, 3, 0, slot % BLOCK_SIZE] ^= np.uint64(1)

    (result,) = executor.decode([_next(row, _bare(token))])

    assert isinstance(result, SequenceFault)


@pytest.mark.parametrize(("prefill_ms", "least"), [(1, 8), (7_000, 8), (20_000, 20), (20_001, 21)])
def test_prefill_time_is_spread(prefill_ms: int, least: int) -> None:
    """At least 8 chunks, none above a second; ends never fall and the last is the prompt's."""
    executor, _ = _executor()
    spec = _spec({"pieces": ["a"], "prefill_ms": prefill_ms})
    ends = executor.chunk_ends(_key(), spec)

    assert least == len(ends)
    assert sorted(ends) == list(ends)
    assert spec.num_prompt_tokens == ends[-1]


def test_chunks_follow_the_tokens_when_there_are_more() -> None:
    """A prompt of many chunks needs no empty ones; without a prefill time there are none at all."""
    executor, _ = _executor()
    long = _spec({"pieces": ["a" * 1000], "prefill_ms": 5})
    short = _spec({"pieces": ["a"]})

    assert [*range(64, long.num_prompt_tokens, 64), long.num_prompt_tokens] == list(executor.chunk_ends(_key(), long))
    assert (short.num_prompt_tokens,) == executor.chunk_ends(_key(), short)


def test_a_prompt_that_is_no_script_is_a_fault() -> None:
    """Prefill and commit refuse it as a bad request; nothing is raised that would break the loop."""
    executor, _ = _executor()
    spec = RequestSpec(
        request_id=RequestId("r"),
        prompt_ids=(TokenId(5), TokenId(999)),
        max_tokens=1,
        sampling=SamplingParams(seed=0),
    )

    with pytest.raises(SequenceFault) as in_prefill:
        executor.chunk_ends(_key(), spec)
    with pytest.raises(SequenceFault) as in_decode:
        executor.check_commit(_key(), spec, _table(spec))
    assert [ErrorCode.INVALID_REQUEST] * 2 == [in_prefill.value.code, in_decode.value.code]


def test_a_step_lasts_the_longest_of_its_members() -> None:
    """20 ms and 1 ms and 0 together take 20 ms, not 21."""
    executor, _ = _executor()
    rows: list[DecodeRow] = []
    for place, step_ms in enumerate((1, 20, 0)):
        key, spec = _key(str(place)), _spec({"pieces": ["a"], "repeat": 9, "step_ms": step_ms})
        table = _table(spec, first=50 * place)
        _prefill(executor, key, spec, table)
        executor.check_commit(key, spec, table)
        rows.append(_row(key, spec, table, A, 2))
    started_at = time.monotonic()
    executor.decode(rows)

    assert time.monotonic() - started_at >= 0.02


def test_an_interrupt_ends_a_long_step() -> None:
    """A step of a minute ends at once when the loop is stopping, from another thread."""
    executor, _, row = _joined({"pieces": ["a"], "repeat": 9, "step_ms": 60_000})
    threading.Timer(0.01, executor.interrupt).start()
    started_at = time.monotonic()
    executor.decode([row])

    assert time.monotonic() - started_at < 30


def test_release_forgets_a_sequence() -> None:
    """A row of it afterwards is a bug that shows; releasing twice is fine."""
    executor, _, row = _joined({"pieces": ["a"], "repeat": 9})
    executor.release(row.key)
    executor.release(row.key)

    with pytest.raises(KeyError):
        executor.decode([row])


def test_a_row_out_of_sequence_is_a_bug() -> None:
    """Feeding token 3 before token 2 would leave a hole in the context."""
    executor, _, row = _joined({"pieces": ["a"], "repeat": 9})

    with pytest.raises(RuntimeError, match="fed position"):
        executor.decode([_next(row, A)])


def _fed(row: DecodeRow, tokens: list[TokenId], table: BlockTable, *, wants_token: bool) -> DecodeRow:
    """A replay: these output tokens from the first on."""
    return DecodeRow(
        key=row.key,
        spec=row.spec,
        block_table=table,
        input_tokens=tuple(tokens),
        index=len(tokens) + 1,
        outputs=tokens,
        wants_token=wants_token,
    )


def test_a_replay_leaves_the_same_kv_as_the_first_run() -> None:
    """Twenty tokens in one row: the same digests as token by token, no answer, and the next token is the script's."""
    script: dict[str, object] = {"pieces": ["a", "b"], "repeat": 99}
    executor, memory, row = _joined(script)
    answer = [A, *(TokenId(int(str(token))) for token in _play(executor, row, 20))]
    again, same_memory, same_row = _joined(script)
    (nothing,) = again.decode([_fed(same_row, answer[:20], same_row.block_table, wants_token=False)])
    (following,) = again.decode([_row(row.key, row.spec, row.block_table, answer[20], 22)])

    assert nothing is None
    assert following == SampledToken(token_id=B)
    at = same_row.position
    for place in range(20):
        slot = row.block_table.slot_of(at + place)
        first, second = (
            digest_words(each)[slot // BLOCK_SIZE, :, :, slot % BLOCK_SIZE] for each in (memory, same_memory)
        )
        assert np.array_equal(first, second)


def test_a_context_grows_with_its_block_table() -> None:
    """It joins with a table for its prompt and a block more, and is checked all the same when it is longer."""
    executor, memory = _executor()
    spec = _spec({"pieces": ["a", "b"], "repeat": 99})
    long = _table(spec)
    short = BlockTable(long.block_ids[: spec.num_prompt_tokens // BLOCK_SIZE + 2], BLOCK_SIZE)
    _prefill(executor, _key(), spec, short)
    executor.check_commit(_key(), spec, short)
    results = _play(executor, _row(_key(), spec, long, A, 2), 60)
    assert [B, A] * 30 == results
    last = spec.num_prompt_tokens + 59
    slot = long.slot_of(last)
    digest_words(memory)[slot // BLOCK_SIZE, 0, 0, slot % BLOCK_SIZE] ^= np.uint64(1)
    (result,) = executor.decode([_row(_key(), spec, long, A, 62)])

    assert isinstance(result, SequenceFault)


def test_a_continued_prompt_gets_no_token() -> None:
    """Its answer has one already."""
    executor, _ = _executor()
    spec = _spec({"pieces": ["a"]})
    (end,) = executor.chunk_ends(_key(), spec)
    chunk = PrefillChunk(
        key=_key(), spec=spec, block_table=_table(spec), start=0, end=end, is_last=True, wants_token=False
    )

    assert executor.prefill([chunk]) == [None]
