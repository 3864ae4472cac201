"""The deterministic generator in the model's place: plays JSON scripts through the real loops, pools and frames.

What it does for a sequence is in its script (`shared.text.script`). With `eos` false, or when the end token is ignored
and the list is exhausted, the answer goes on until max_tokens: the pieces from the start again, or the end token again.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.domain.clock import Clock
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.engine.executor import DecodeRow, PrefillChunk, SampledToken, SequenceFault
from shared.engine.kv_digest import NUM_LAYERS, digest_words, digests, salt_word, token_words
from shared.kv.block_table import BlockTable
from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory
from shared.text.script import SCRIPTED_EOS_ID, SCRIPTED_WINDOW, Script

# A prompt with a prefill time is spread so that a cancel finds a border soon and KV moves while prefill still runs.
MIN_TIMED_CHUNKS = 8
MAX_CHUNK_MS = 1000.0
# Of a context a step recomputes the last block and this many more, in turn: all of a context of n blocks is checked
# within n / 4 steps, and 100 sequences of any length cost a step 2 to 3 ms.
NUM_CHECKED_BLOCKS = 4
_NUM_EARLY_LAYERS = NUM_LAYERS // 2  # of a chunk, written and told when its step begins; the others when it ends
_COMMIT_CHECK_BLOCKS = 1024  # a commit is checked in pieces of 1 MiB, whatever the length of the prompt


@dataclass(slots=True)
class _Prompt:
    """A sequence in prefill."""

    script: Script
    words: npt.NDArray[np.uint64]  # a token stands for all before it: see `token_words`
    salt: np.uint64
    chunk_s: float


@dataclass(slots=True)
class _Context:
    """A sequence in decode: the words of the tokens whose KV is there, [block, slot]; grows with its blocks."""

    script: Script
    words: npt.NDArray[np.uint64]
    num_tokens: int
    salt: np.uint64
    next_checked_block: int = 0

    def make_room(self, num_blocks: int) -> None:
        """Doubles, so that an answer of n blocks is copied as often as log n."""
        if num_blocks > len(self.words):
            grown = np.zeros((2 * num_blocks, self.words.shape[1]), dtype=np.uint64)
            grown[: len(self.words)] = self.words
            self.words = grown


class ScriptedExecutor:
    """An `Executor` without a model. A step lasts the longest time that a member's script asks for."""

    def __init__(self, memory: KvMemory, *, chunk_tokens: int, clock: Clock) -> None:
        self._memory = memory
        self._words = digest_words(memory)
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._prompts: dict[RequestKey, _Prompt] = {}
        self._contexts: dict[RequestKey, _Context] = {}
        self._interrupted = threading.Event()

    @property
    def layout(self) -> KvLayout:
        return self._memory.layout

    @property
    def window(self) -> int:
        return SCRIPTED_WINDOW

    @property
    def eos_ids(self) -> frozenset[TokenId]:
        return frozenset({SCRIPTED_EOS_ID})

    def chunk_ends(self, key: RequestKey, spec: RequestSpec) -> tuple[int, ...]:
        script = _script_of(spec)
        num_tokens = spec.num_prompt_tokens
        num_filled = -(-num_tokens // self._chunk_tokens)
        num_chunks = num_filled
        if script.prefill_ms > 0:
            num_chunks = max(num_filled, MIN_TIMED_CHUNKS, int(-(-script.prefill_ms // MAX_CHUNK_MS)))
        self._prompts[key] = _Prompt(
            script=script,
            words=_prompt_words(spec),
            salt=salt_word(spec.kv_salt),
            chunk_s=script.prefill_ms / 1000 / num_chunks,
        )
        return tuple(
            min(-(-number * num_filled // num_chunks) * self._chunk_tokens, num_tokens)
            for number in range(1, num_chunks + 1)
        )

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: Callable[[int], None] | None = None
    ) -> list[SampledToken | SequenceFault | None]:
        ends_at = self._clock.monotonic() + max(self._prompts[chunk.key].chunk_s for chunk in chunks)
        self._write_prompts(chunks, 0, _NUM_EARLY_LAYERS)
        if on_layers is not None:
            on_layers(_NUM_EARLY_LAYERS)
        self._wait_until(ends_at)
        # Only now: a layer that leaves before it is told does so without its digests.
        self._write_prompts(chunks, _NUM_EARLY_LAYERS, NUM_LAYERS)
        return [
            _played(self._prompts[chunk.key].script, 1) if chunk.is_last and chunk.wants_token else None
            for chunk in chunks
        ]

    def check_commit(self, key: RequestKey, spec: RequestSpec, block_table: BlockTable) -> None:
        """Recompute the digests of the whole prompt, and see that the last block is zero beyond it."""
        block_size = self.layout.block_size
        words = np.zeros(block_table.capacity_tokens, dtype=np.uint64)
        words[: spec.num_prompt_tokens] = _prompt_words(spec)
        context = _Context(
            script=_script_of(spec),
            words=words.reshape(-1, block_size),
            num_tokens=spec.num_prompt_tokens,
            salt=salt_word(spec.kv_salt),
        )
        num_blocks = self.layout.num_blocks_for(spec.num_prompt_tokens)
        for start in range(0, num_blocks, _COMMIT_CHECK_BLOCKS):
            places = np.arange(start, min(start + _COMMIT_CHECK_BLOCKS, num_blocks))
            positions = places[:, None] * block_size + np.arange(block_size)
            expected = digests(np.full(len(places), context.salt), context.words[places])
            expected *= (positions < spec.num_prompt_tokens)[:, None, None, :]
            if not np.array_equal(self._words[block_table.indices[places]], expected):
                raise _corrupt()
        self._contexts[key] = context

    def decode(self, rows: Sequence[DecodeRow]) -> list[SampledToken | SequenceFault | None]:
        contexts = [self._contexts[row.key] for row in rows]
        ends_at = self._clock.monotonic() + max(context.script.step_ms for context in contexts) / 1000
        is_good = self._check(rows, contexts)
        results = [
            _corrupt() if not good else _played(context.script, row.index) if row.wants_token else None
            for row, context, good in zip(rows, contexts, is_good, strict=True)
        ]
        self._write_fed(
            [
                (row, context)
                for row, context, result in zip(rows, contexts, results, strict=True)
                if not isinstance(result, SequenceFault)
            ]
        )
        self._wait_until(ends_at)
        return results

    def release(self, key: RequestKey) -> None:
        self._prompts.pop(key, None)
        self._contexts.pop(key, None)

    def interrupt(self) -> None:
        self._interrupted.set()

    def _write_prompts(self, chunks: Sequence[PrefillChunk], layer_start: int, layer_end: int) -> None:
        for chunk in chunks:
            if chunk.end == chunk.start:
                continue
            prompt = self._prompts[chunk.key]
            positions = np.arange(chunk.start, chunk.end)
            words = digests(np.full(len(positions), prompt.salt), prompt.words[chunk.start : chunk.end, None])
            blocks = chunk.block_table.indices[positions // self.layout.block_size]
            slots = positions % self.layout.block_size
            self._words[blocks, layer_start:layer_end, :, slots] = words[:, layer_start:layer_end, :, 0]

    def _write_fed(self, fed: Sequence[tuple[DecodeRow, _Context]]) -> None:
        """Append the fed tokens of each row to its context and their digests to the cache."""
        if not fed:
            return
        block_size = self.layout.block_size
        row_positions = [np.arange(row.position, row.position + len(row.input_tokens)) for row, _ in fed]
        tokens = np.array([token for row, _ in fed for token in row.input_tokens], dtype=np.uint32)
        words = token_words(tokens, np.concatenate(row_positions))
        place = 0
        for (row, context), positions in zip(fed, row_positions, strict=True):
            end = place + len(positions)
            words[place : place + 1] += context.words[(row.position - 1) // block_size, (row.position - 1) % block_size]
            if len(positions) > 1:
                words[place:end].cumsum(out=words[place:end])
            context.num_tokens = row.position + len(positions)
            context.make_room(self.layout.num_blocks_for(context.num_tokens))
            context.words[positions // block_size, positions % block_size] = words[place:end]
            place = end
        salts = np.concatenate([np.full(len(row.input_tokens), context.salt) for row, context in fed])
        blocks = np.concatenate(
            [row.block_table.indices[at // block_size] for (row, _), at in zip(fed, row_positions, strict=True)]
        )
        self._write(blocks, np.concatenate(row_positions), digests(salts, words[:, None]))

    def _write(
        self, blocks: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], words: npt.NDArray[np.uint64]
    ) -> None:
        self._words[blocks, :, :, positions % self.layout.block_size] = words[..., 0]

    def _check(self, rows: Sequence[DecodeRow], contexts: Sequence[_Context]) -> list[bool]:
        """Recompute some blocks of each row's context; whether each row's were right."""
        block_size = self.layout.block_size
        places: list[npt.NDArray[np.int64]] = []
        for row, context in zip(rows, contexts, strict=True):
            if row.position != context.num_tokens:
                raise RuntimeError(f"fed position {row.position}, the context has {context.num_tokens} tokens")
            places.append(_blocks_to_check(context, self.layout.num_blocks_for(context.num_tokens)))
        counts = np.array([len(taken) for taken in places])
        owner = np.repeat(np.arange(len(rows)), counts)
        blocks = np.concatenate([row.block_table.indices[taken] for row, taken in zip(rows, places, strict=True)])
        words = np.concatenate([context.words[taken] for context, taken in zip(contexts, places, strict=True)])
        salts = np.array([context.salt for context in contexts], dtype=np.uint64)[owner]
        num_tokens = np.array([context.num_tokens for context in contexts], dtype=np.int64)[owner]
        positions = np.concatenate(places)[:, None] * block_size + np.arange(block_size)
        is_beyond = positions >= num_tokens[:, None]
        is_right = (self._words[blocks] == digests(salts, words)) | is_beyond[:, None, None, :]
        is_bad = np.zeros(len(rows), dtype=np.bool_)
        is_bad[owner[~is_right.all(axis=(1, 2, 3))]] = True
        return [not bad for bad in is_bad.tolist()]

    def _wait_until(self, moment: float) -> None:
        left = moment - self._clock.monotonic()
        if left > 0:
            self._interrupted.wait(left)


def _blocks_to_check(context: _Context, num_blocks: int) -> npt.NDArray[np.int64]:
    """Places in the block table: all of a short context, else the last and the next few in turn."""
    if num_blocks <= NUM_CHECKED_BLOCKS + 1:
        return np.arange(num_blocks)
    start = context.next_checked_block
    context.next_checked_block = (start + NUM_CHECKED_BLOCKS) % num_blocks
    return np.array([num_blocks - 1, *((start + step) % num_blocks for step in range(NUM_CHECKED_BLOCKS))])


def _played(script: Script, index: int) -> SampledToken | SequenceFault:
    if script.fail_at == index:
        return SequenceFault(ErrorCode.INTERNAL, "the script asks for a failure at this token")
    return SampledToken(token_id=script.token_id(index))


def _prompt_words(spec: RequestSpec) -> npt.NDArray[np.uint64]:
    return token_words(np.array(spec.prompt_ids, dtype=np.uint32), np.arange(spec.num_prompt_tokens)).cumsum()


def _script_of(spec: RequestSpec) -> Script:
    try:
        return Script.from_prompt(spec.prompt_ids)
    except ServingError as error:
        raise SequenceFault(error.code, error.message, param=error.param) from error


def _corrupt() -> SequenceFault:
    return SequenceFault(ErrorCode.KV_CORRUPT, "the KV of a token is not what it should be")
