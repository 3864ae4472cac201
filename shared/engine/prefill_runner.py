"""Prompts into chunks, chunks into shared steps: what the engine thread of a prefill worker drives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from shared.domain.ids import RequestKey
from shared.domain.request import RequestSpec
from shared.engine.batcher import pack_chunks
from shared.engine.executor import Executor, PrefillChunk, SampledToken, SequenceFault
from shared.engine.step_guard import StepGuard
from shared.kv.block_table import BlockTable
from shared.kv.frame_plan import LayersDone


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPrompt:
    """Compute the prompt of `spec` into the blocks of `block_table`; a key that is there already changes nothing.

    Positions before `start`, which begins a block and is less than the prompt's length, have their KV already.
    `wants_token` false: the answer is continued, so output token 1 exists and none is sampled.
    """

    key: RequestKey
    spec: RequestSpec
    block_table: BlockTable
    start: int = 0
    wants_token: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPrompt:
    """Stop working on a prompt, if it is here; acknowledged by `PrefillStep.dropped` in any case."""

    key: RequestKey


PrefillCommand = AddPrompt | DropPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDone:
    """Positions [start, end) of a prompt have their KV; both are equal for a chunk that only took time."""

    key: RequestKey
    start: int
    end: int
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStep:
    """What one step did, or answers to commands (then `num_sequences` is 0).

    A prompt is gone from the engine after its last chunk, its fault, or `dropped`.
    """

    chunks: tuple[ChunkDone, ...]
    first_tokens: Mapping[RequestKey, SampledToken]
    """Output token 1 of each prompt whose last chunk is among `chunks` and that wants it."""
    faults: Mapping[RequestKey, SequenceFault]
    dropped: tuple[RequestKey, ...]
    num_sequences: int
    """Prompts that shared the step."""
    num_tokens: int
    """Prompt tokens computed."""


@dataclass(slots=True)
class _Prompt:
    command: AddPrompt
    ends: tuple[int, ...]
    num_chunks_done: int = 0

    @property
    def start(self) -> int:
        return self.ends[self.num_chunks_done - 1] if self.num_chunks_done else self.command.start

    @property
    def end(self) -> int:
        return self.ends[self.num_chunks_done]


@dataclass(slots=True)
class _Notes:
    """What `apply` has to tell before the next step."""

    faults: dict[RequestKey, SequenceFault] = field(default_factory=dict[RequestKey, SequenceFault])
    dropped: list[RequestKey] = field(default_factory=list[RequestKey])


class PrefillRunner:
    """Takes the oldest prompts first, one chunk of each a round, while the token budget lasts.

    A round is one step, or several where that is no slower: a step cannot be stopped, and what is dropped before its
    turn in the round is not computed.

    Holds as many prompts as the worker adds: the scheduler gives at most two token budgets ahead, blocks bound the
    rest.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        token_budget: int,
        max_sequences: int,
        step_tokens: int | None = None,
        tell_layers: Callable[[Mapping[RequestKey, LayersDone]], None] | None = None,
    ) -> None:
        """`step_tokens` of a round share a step, or one chunk; None: all.

        `tell_layers` hears, within a step and in its thread, how far the layers of its chunks are.
        """
        self._executor = executor
        self._tell_layers = tell_layers
        self._token_budget = token_budget
        self._max_sequences = max_sequences
        self._step_tokens = token_budget if step_tokens is None else step_tokens
        self._prompts: dict[RequestKey, _Prompt] = {}  # in order of arrival
        self._round: list[RequestKey] = []  # whose turn is still to come; may be gone
        self._notes = _Notes()
        self._guard = StepGuard()

    @property
    def has_work(self) -> bool:
        return bool(self._prompts)

    def has_room(self) -> bool:
        """Whether the next step could take in one more prompt."""
        num_tokens = sum(prompt.end - prompt.start for prompt in self._prompts.values())
        return bool(self._prompts) and num_tokens < self._token_budget and len(self._prompts) < self._max_sequences

    def apply(self, command: PrefillCommand) -> None:
        match command:
            case AddPrompt(key=key, spec=spec):
                if key in self._prompts:
                    return
                try:
                    ends = self._executor.chunk_ends(key, spec)
                except SequenceFault as fault:
                    self._executor.release(key)
                    self._notes.faults[key] = fault
                    return
                # The borders stay where they are without a cached start; the first chunk may begin behind some.
                self._prompts[key] = _Prompt(command, tuple(end for end in ends if end > command.start))
            case DropPrompt(key=key):
                if self._prompts.pop(key, None) is not None:
                    self._executor.release(key)
                self._notes.dropped.append(key)
            case _:
                assert_never(command)

    def acknowledge(self) -> PrefillStep | None:
        if not (self._notes.faults or self._notes.dropped):
            return None
        notes, self._notes = self._notes, _Notes()
        return PrefillStep(
            chunks=(),
            first_tokens={},
            faults=notes.faults,
            dropped=tuple(notes.dropped),
            num_sequences=0,
            num_tokens=0,
        )

    def step(self) -> PrefillStep | None:
        if not self._prompts:
            return None
        chunks = [_next_chunk(prompt) for prompt in self._next_prompts()]
        results = self._guard.run(lambda: self._executor.prefill(chunks, self._on_layers(chunks)), len(chunks))
        done: list[ChunkDone] = []
        first_tokens: dict[RequestKey, SampledToken] = {}
        faults: dict[RequestKey, SequenceFault] = {}
        for chunk, result in zip(chunks, results, strict=True):
            if isinstance(result, SequenceFault):
                faults[chunk.key] = result
                self._remove(chunk.key)
                continue
            done.append(ChunkDone(key=chunk.key, start=chunk.start, end=chunk.end, is_last=chunk.is_last))
            self._prompts[chunk.key].num_chunks_done += 1
            if chunk.is_last:
                if (result is not None) != chunk.wants_token:
                    raise RuntimeError("the last chunk of a prompt gave no token, or one that nobody wants")
                if result is not None:
                    first_tokens[chunk.key] = result
                self._remove(chunk.key)
        return PrefillStep(
            chunks=tuple(done),
            first_tokens=first_tokens,
            faults=faults,
            dropped=(),
            num_sequences=len(chunks),
            num_tokens=sum(chunk.end - chunk.start for chunk in done),
        )

    def interrupt(self) -> None:
        self._executor.interrupt()

    def _next_prompts(self) -> list[_Prompt]:
        """Those of the round that share the next step; a new round where none is left of the last."""
        left = [key for key in self._round if key in self._prompts] or self._pack(
            list(self._prompts), self._token_budget
        )
        picked = self._pack(left, self._step_tokens)
        self._round = [key for key in left if key not in picked]
        return [self._prompts[key] for key in picked]

    def _pack(self, keys: Sequence[RequestKey], num_tokens: int) -> list[RequestKey]:
        prompts = [self._prompts[key] for key in keys]
        picked = pack_chunks(
            (prompt.end - prompt.start for prompt in prompts),
            token_budget=num_tokens,
            max_sequences=self._max_sequences,
        )
        return [keys[place] for place in picked]

    def _on_layers(self, chunks: Sequence[PrefillChunk]) -> Callable[[int], None] | None:
        tell = self._tell_layers
        if tell is None:
            return None
        return lambda num_layers: tell(
            {
                chunk.key: LayersDone(token_end=chunk.end, num_layers=num_layers, is_last=chunk.is_last)
                for chunk in chunks
            }
        )

    def _remove(self, key: RequestKey) -> None:
        del self._prompts[key]
        self._executor.release(key)


def _next_chunk(prompt: _Prompt) -> PrefillChunk:
    return PrefillChunk(
        key=prompt.command.key,
        spec=prompt.command.spec,
        block_table=prompt.command.block_table,
        start=prompt.start,
        end=prompt.end,
        is_last=prompt.num_chunks_done == len(prompt.ends) - 1,
        wants_token=prompt.command.wants_token,
    )
