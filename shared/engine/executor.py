"""What a service needs from an engine: chunks and rows in, token ids out. And how one sequence may fail alone."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestKey, TokenId
from shared.domain.request import FinishReason, RequestSpec
from shared.domain.sampling import TokenLogprobs
from shared.kv.block_table import BlockTable
from shared.kv.layout import KvLayout


class SequenceFault(ServingError):
    """One sequence cannot go on; the others of its step are not concerned.

    Returned as a value by a step, raised where only one sequence is at hand.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """An output token, with its log probabilities where they were asked for."""

    token_id: TokenId
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Prompt positions [start, end) of one sequence; positions before `start` are in the cache. May be empty.

    Output token 1 is sampled after the last chunk, unless the answer is continued (`wants_token` false).
    """

    key: RequestKey
    spec: RequestSpec
    block_table: BlockTable
    start: int
    end: int
    is_last: bool
    wants_token: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """Feed output tokens `index - len(input_tokens)` ... `index - 1` of one sequence, get output token `index`.

    One input token is the usual step; several are a replay. `wants_token` false: only the KV is wanted.
    """

    key: RequestKey
    spec: RequestSpec
    block_table: BlockTable
    input_tokens: tuple[TokenId, ...]
    index: int
    outputs: Sequence[TokenId]
    """Output tokens 1 ... `index - 1` where a token is wanted, for penalties; grows behind your back, don't keep it."""
    wants_token: bool = True

    @property
    def position(self) -> int:
        """Where the KV of the first fed token goes: output token i lies at prompt length + i - 1."""
        return self.spec.num_prompt_tokens + self.index - 1 - len(self.input_tokens)


class Executor(Protocol):
    """The model, or what stands in its place. All calls but `interrupt` come from the one engine thread.

    `prefill` and `decode` answer member for member; a fault of one member leaves the results of the others as they
    would be without it. Any other exception means that the whole step has failed.
    """

    @property
    def layout(self) -> KvLayout: ...

    @property
    def window(self) -> int:
        """Most tokens of a sequence, prompt and answer together."""
        ...

    @property
    def eos_ids(self) -> frozenset[TokenId]: ...

    def chunk_ends(self, key: RequestKey, spec: RequestSpec) -> tuple[int, ...]:
        """Begin a prompt: where its chunks end.

        Never falls, and the last is the prompt's length; a repeated end is a chunk that only takes time. Raises
        SequenceFault.
        """
        ...

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: Callable[[int], None] | None = None
    ) -> list[SampledToken | SequenceFault | None]:
        """One step over at most one chunk a prompt: writes their KV; output token 1 for a last chunk that wants it.

        `on_layers(n)` is called, with rising n and in this thread, when the KV of the first n layers of every chunk is
        written; not every n is told, and the last one never is: the return tells it.
        """
        ...

    def check_commit(self, key: RequestKey, spec: RequestSpec, block_table: BlockTable) -> None:
        """Begin decoding on KV that was handed over; raises SequenceFault KV_CORRUPT if it sees that it is wrong."""
        ...

    def decode(self, rows: Sequence[DecodeRow]) -> list[SampledToken | SequenceFault | None]:
        """One step over at most one row a sequence: writes the KV of the fed tokens, returns the next ones.

        None exactly where `wants_token` is false.
        """
        ...

    def release(self, key: RequestKey) -> None:
        """Forget what is kept for a sequence; unknown keys are fine."""
        ...

    def interrupt(self) -> None:
        """Any thread: the loop is stopping, return from a step as soon as you can. Results no longer matter."""
        ...


def finish_reason(
    spec: RequestSpec, *, index: int, token_id: TokenId, eos_ids: Collection[TokenId]
) -> FinishReason | None:
    """Whether output token `index` ends the sequence, and why; the end token wins over the length.

    End tokens are EOS, unless it is ignored, and the request's own; up to token `min_tokens` none of them ends it.
    """
    if spec.sampling.is_end(token_id, index=index, eos_ids=() if spec.ignore_eos else eos_ids):
        return FinishReason.STOP
    if index >= spec.max_tokens:
        return FinishReason.LENGTH
    return None


def internal_fault() -> SequenceFault:
    """What a sequence ends with when a step broke for a reason that is nobody's business outside."""
    return SequenceFault(ErrorCode.INTERNAL, "internal error")
