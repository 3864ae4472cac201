"""Iteration-level batching: every sequence that may go on gives one row to every step. For a decode worker's thread.

A sequence that was continued elsewhere before (failover, preemption) is replayed: its output tokens are fed again
through the same kernels, some a step beside the rows of the others, and then it goes on as if it had never been away.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from shared.domain.ids import RequestKey, TokenId
from shared.domain.request import FinishReason, RequestSpec
from shared.engine.executor import DecodeRow, Executor, SampledToken, SequenceFault, finish_reason
from shared.engine.step_guard import StepGuard
from shared.kv.block_table import BlockTable

# Replayed tokens a step, all sequences together: as many as others get a token in it, within these bounds. Each costs
# what a row costs, so a replay about doubles the steps of the others, however few they are. Beside a single one 16 made
# its steps six times as long (7 ms alone, 12 with 3, 40 with 16) and the replay itself hardly shorter.
MIN_REPLAY_TOKENS = 3
MAX_REPLAY_TOKENS = 16
# Where nobody waits for a token, as many as a prefill chunk has; beyond that a step only gets longer, not cheaper.
MAX_REPLAY_TOKENS_ALONE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSequence:
    """A sequence whose KV is whole for the prompt.

    `outputs` are its output tokens so far, at least one: token 1 after a hand-over, all that the client has in a
    continued answer. Token i is computed only while i <= `may_compute_upto`, and fed only where `block_table` has room.
    """

    key: RequestKey
    spec: RequestSpec
    block_table: BlockTable
    outputs: tuple[TokenId, ...]
    may_compute_upto: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Check the handed-over KV and take the sequence into the batch; a key that is there already changes nothing."""

    sequence: DecodeSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Take the sequence out, if it is here; acknowledged by `DecodeStep.left` in any case."""

    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Room to go on: credit in tokens, and the block table, which only grows.

    A lower credit or shorter table than before, or an unknown key, changes nothing.
    """

    key: RequestKey
    upto_index: int
    block_table: BlockTable


DecodeCommand = Join | Leave | Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """Output token `index`; with a `finish` it is the last, and the sequence has left the batch."""

    key: RequestKey
    index: int
    sampled: SampledToken
    finish: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """What one step did, or answers to commands (then `num_sequences` is 0).

    No step uses the blocks of a sequence after its `finish`, its fault, or `left`.
    """

    joined: tuple[RequestKey, ...]
    """Sequences whose KV was found good and that are in the batch from this step on."""
    tokens: tuple[NewToken, ...]
    faults: Mapping[RequestKey, SequenceFault]
    left: tuple[RequestKey, ...]
    """One entry for every Leave."""
    num_sequences: int
    replayed: Mapping[RequestKey, int] = field(default_factory=dict[RequestKey, int])
    """Output tokens fed again, of continued answers."""

    @property
    def num_replayed(self) -> int:
        return sum(self.replayed.values())


@dataclass(slots=True)
class _Running:
    key: RequestKey
    spec: RequestSpec
    block_table: BlockTable
    outputs: list[TokenId]
    may_compute_upto: int
    num_fed: int = 0  # of `outputs`: their KV is there

    @property
    def num_feedable(self) -> int:
        """How many output tokens the next step could feed: those that are not, as far as blocks and credit reach."""
        num_positions = self.block_table.capacity_tokens - self.spec.num_prompt_tokens
        # The last output token is fed only to get the next one.
        num_wanted = len(self.outputs) if len(self.outputs) < self.may_compute_upto else len(self.outputs) - 1
        return min(num_positions, num_wanted) - self.num_fed

    @property
    def is_replayed(self) -> bool:
        """More than its last output token is still to be fed."""
        return self.num_fed < len(self.outputs) - 1

    def row(self, num_tokens: int) -> DecodeRow:
        end = self.num_fed + num_tokens
        return DecodeRow(
            key=self.key,
            spec=self.spec,
            block_table=self.block_table,
            input_tokens=tuple(self.outputs[self.num_fed : end]),
            index=end + 1,
            outputs=self.outputs,
            wants_token=end == len(self.outputs),
        )


@dataclass(slots=True)
class _Notes:
    """What `apply` has to tell before the next step."""

    joined: list[RequestKey] = field(default_factory=list[RequestKey])
    faults: dict[RequestKey, SequenceFault] = field(default_factory=dict[RequestKey, SequenceFault])
    left: list[RequestKey] = field(default_factory=list[RequestKey])

    @property
    def is_empty(self) -> bool:
        return not (self.joined or self.faults or self.left)


class DecodeRunner:
    """Decides about ends (EOS, length); the worker decides about credit, and bounds how many sequences join."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._running: dict[RequestKey, _Running] = {}
        self._notes = _Notes()
        self._guard = StepGuard()

    @property
    def has_work(self) -> bool:
        return any(sequence.num_feedable > 0 for sequence in self._running.values())

    def apply(self, command: DecodeCommand) -> None:
        match command:
            case Join(sequence=sequence):
                self._join(sequence)
            case Leave(key=key):
                if key in self._running:
                    self._remove(key)
                self._notes.left.append(key)
            case Grant(key=key, upto_index=upto_index, block_table=block_table):
                running = self._running.get(key)
                if running is not None:
                    running.may_compute_upto = max(running.may_compute_upto, upto_index)
                    running.block_table = max(running.block_table, block_table, key=len)
            case _:
                assert_never(command)

    def acknowledge(self) -> DecodeStep | None:
        if self._notes.is_empty:
            return None
        notes, self._notes = self._notes, _Notes()
        return DecodeStep(
            joined=tuple(notes.joined), tokens=(), faults=notes.faults, left=tuple(notes.left), num_sequences=0
        )

    def step(self) -> DecodeStep | None:
        rows = self._next_rows()
        if not rows:
            return None
        results = self._guard.run(lambda: self._executor.decode(rows), len(rows))
        tokens: list[NewToken] = []
        faults: dict[RequestKey, SequenceFault] = {}
        for row, result in zip(rows, results, strict=True):
            member = self._running[row.key]
            if isinstance(result, SequenceFault):
                faults[row.key] = result
                self._remove(row.key)
                continue
            member.num_fed = row.index - 1
            if (result is not None) != row.wants_token:
                raise RuntimeError("a row gave a token that it did not want, or none that it did")
            if result is None:
                continue
            token_id = result.token_id
            finish = finish_reason(row.spec, index=row.index, token_id=token_id, eos_ids=self._executor.eos_ids)
            tokens.append(NewToken(key=row.key, index=row.index, sampled=result, finish=finish))
            member.outputs.append(token_id)
            if finish is not None:
                self._remove(row.key)
        return DecodeStep(
            joined=(),
            tokens=tuple(tokens),
            faults=faults,
            left=(),
            num_sequences=len(rows),
            replayed={row.key: num for row in rows if (num := len(row.input_tokens) - row.wants_token)},
        )

    def _next_rows(self) -> list[DecodeRow]:
        """One a sequence that can go on. Replays share what a step may replay, in order of joining."""
        able = [sequence for sequence in self._running.values() if sequence.num_feedable > 0]
        replay_left = _replay_tokens(num_waiting=sum(not each.is_replayed for each in able))
        rows: list[DecodeRow] = []
        for sequence in able:
            num_tokens = sequence.num_feedable
            if sequence.is_replayed:
                num_tokens = min(num_tokens, replay_left)
                replay_left -= num_tokens
            if num_tokens > 0:
                rows.append(sequence.row(num_tokens))
        return rows

    def interrupt(self) -> None:
        self._executor.interrupt()

    def _join(self, sequence: DecodeSequence) -> None:
        if sequence.key in self._running:
            return
        try:
            self._executor.check_commit(sequence.key, sequence.spec, sequence.block_table)
        except SequenceFault as fault:
            self._executor.release(sequence.key)
            self._notes.faults[sequence.key] = fault
            return
        self._running[sequence.key] = _Running(
            key=sequence.key,
            spec=sequence.spec,
            block_table=sequence.block_table,
            outputs=list(sequence.outputs),
            may_compute_upto=sequence.may_compute_upto,
        )
        self._notes.joined.append(sequence.key)

    def _remove(self, key: RequestKey) -> None:
        del self._running[key]
        self._executor.release(key)


def _replay_tokens(*, num_waiting: int) -> int:
    """What a step may replay beside rows for so many sequences that wait for their next token."""
    return max(MIN_REPLAY_TOKENS, min(num_waiting, MAX_REPLAY_TOKENS)) if num_waiting else MAX_REPLAY_TOKENS_ALONE
