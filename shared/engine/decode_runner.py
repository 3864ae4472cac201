"""Iteration-level batching: every sequence that may go on gives one row to every step. For a decode worker's thread."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from shared.domain.ids import RequestKey, TokenId
from shared.domain.request import FinishReason, RequestSpec
from shared.engine.executor import DecodeRow, Executor, SequenceFault, finish_reason
from shared.engine.step_guard import StepGuard
from shared.kv.block_table import BlockTable


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSequence:
    """A sequence whose KV is whole for the prompt and for the output tokens before `next_input_token`.

    After a hand-over: `next_input_token` is token 1, `next_index` 2. Token i is computed only while i <=
    `may_compute_upto`.
    """

    key: RequestKey
    spec: RequestSpec
    block_table: BlockTable
    next_input_token: TokenId
    next_index: int
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
    """Raise `may_compute_upto`; a lower value than before, or an unknown key, changes nothing."""

    key: RequestKey
    upto_index: int


DecodeCommand = Join | Leave | Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """Output token `index`; with a `finish` it is the last, and the sequence has left the batch."""

    key: RequestKey
    index: int
    token_id: TokenId
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


@dataclass(slots=True)
class _Running:
    key: RequestKey
    spec: RequestSpec
    block_table: BlockTable
    input_token: TokenId
    next_index: int
    may_compute_upto: int

    @property
    def can_run(self) -> bool:
        return self.next_index <= self.may_compute_upto


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
        return any(sequence.can_run for sequence in self._running.values())

    def apply(self, command: DecodeCommand) -> None:
        match command:
            case Join(sequence=sequence):
                self._join(sequence)
            case Leave(key=key):
                if key in self._running:
                    self._remove(key)
                self._notes.left.append(key)
            case Grant(key=key, upto_index=upto_index):
                running = self._running.get(key)
                if running is not None:
                    running.may_compute_upto = max(running.may_compute_upto, upto_index)
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
        members = [sequence for sequence in self._running.values() if sequence.can_run]
        if not members:
            return None
        rows = [
            DecodeRow(
                key=member.key,
                spec=member.spec,
                block_table=member.block_table,
                input_token=member.input_token,
                index=member.next_index,
            )
            for member in members
        ]
        results = self._guard.run(lambda: self._executor.decode(rows), len(rows))
        tokens: list[NewToken] = []
        faults: dict[RequestKey, SequenceFault] = {}
        for member, result in zip(members, results, strict=True):
            if isinstance(result, SequenceFault):
                faults[member.key] = result
                self._remove(member.key)
                continue
            index = member.next_index
            finish = finish_reason(member.spec, index=index, token_id=result, eos_ids=self._executor.eos_ids)
            tokens.append(NewToken(key=member.key, index=index, token_id=result, finish=finish))
            if finish is not None:
                self._remove(member.key)
            member.input_token = result
            member.next_index = index + 1
        return DecodeStep(
            joined=(),
            tokens=tuple(tokens),
            faults=faults,
            left=(),
            num_sequences=len(rows),
        )

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
            input_token=sequence.next_input_token,
            next_index=sequence.next_index,
            may_compute_upto=sequence.may_compute_upto,
        )
        self._notes.joined.append(sequence.key)

    def _remove(self, key: RequestKey) -> None:
        del self._running[key]
        self._executor.release(key)
