"""What a step of decode costs beside the model, by what it must not depend on: free blocks, cached blocks, requests that
wait. Part of `make bench-engine`; alone: `python tests/bench/step_cost.py`.

The worker's table and the runner, without threads and with an executor that computes nothing: all of a step but the
forward pass, the sampler and the streams. Four sequences run, each grows by a block at every fourth token.
"""

import logging
import time
from collections.abc import Callable, Sequence

import structlog

from decode_worker.sequence import HeldSequence
from shared.domain.ids import RequestKey, TokenId
from shared.domain.request import FinishReason, RequestSpec
from shared.engine.decode_runner import DecodeRunner, Leave
from shared.engine.executor import DecodeRow, PrefillChunk, SampledToken, SequenceFault
from shared.kv.block_pool import BlockState
from shared.kv.block_table import BlockTable
from shared.kv.layout import KvLayout
from shared.obs.metrics import Metrics
from shared.wire import scheduler_pb2
from tests.support.decode_table import LAYOUT, Reader, Table, token

NUM_RUNNING = 4
MAX_SEQUENCES = 128  # a worker's default
STEPS_A_ROUND = 50
NUM_ROUNDS = 12
MAX_TOKENS = 4_000


class IdleExecutor:
    """The same token for everyone at once."""

    window = 1 << 20
    eos_ids: frozenset[TokenId] = frozenset()

    @property
    def layout(self) -> KvLayout:
        return LAYOUT

    def chunk_ends(self, key: RequestKey, spec: RequestSpec) -> tuple[int, ...]:
        """No prompt comes here."""
        raise NotImplementedError

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: Callable[[int], None] | None = None
    ) -> list[SampledToken | SequenceFault | None]:
        """No prompt comes here."""
        raise NotImplementedError

    def check_commit(self, key: RequestKey, spec: RequestSpec, block_table: BlockTable) -> None:
        """Whatever came."""

    def decode(self, rows: Sequence[DecodeRow]) -> list[SampledToken | SequenceFault | None]:
        """At once."""
        return [SampledToken(token_id=TokenId(7)) if row.wants_token else None for row in rows]

    def release(self, key: RequestKey) -> None:
        """Nothing is kept."""

    def interrupt(self) -> None:
        """Nothing takes long."""


class Subject:
    """A worker's table with so many blocks, of which so many are cached, and so many requests that wait for their KV."""

    def __init__(self, *, num_blocks: int, num_cached: int = 0, num_waiting: int = 0) -> None:
        self._metrics = Metrics("decode", "decode-0")
        self._table = Table(self._metrics, num_blocks=num_blocks, max_sequences=MAX_SEQUENCES)
        self._runner = DecodeRunner(IdleExecutor())
        for number in range(num_cached):
            self._end_one(number)
        assert num_cached == self._table.pool.counts()[BlockState.CACHED]
        for number in range(num_waiting):
            self._table.reserve(f"w{number}", prompt=(1, number, 2, 3), max_tokens=MAX_TOKENS)
        self._reader = Reader()
        self._rows = [self._run_one(number) for number in range(NUM_RUNNING)]

    def _end_one(self, number: int) -> None:
        """A request of one block that has ended, and whose block may be found."""
        key = self._table.reserve(f"c{number}", prompt=(number % 997, number // 997, 5, 6), max_tokens=2)
        row = self._table.running(key)
        row.read_from(1, Reader(), 0)
        self._table.step(tokens=(token(key, 2, FinishReason.LENGTH),))
        self._table.service.ack(key, 2, row.reader or Reader())
        self._table.command(f"c{number}", release=scheduler_pb2.Release())
        self._table.engine.commands.clear()
        self._table.events.posted.clear()

    def _run_one(self, number: int) -> HeldSequence:
        self._table.engine.commands.clear()
        key = self._table.reserve(f"r{number}", prompt=(9, number, 9, 9), max_tokens=MAX_TOKENS)
        row = self._table.running(key)
        self._table.service.attach(key, ticket=row.attach_ticket, from_index=1, reader=self._reader)
        self._step_engine()
        return row

    def _step_engine(self) -> None:
        for command in self._table.engine.commands:
            assert not isinstance(command, Leave)
            self._runner.apply(command)
        self._table.engine.commands.clear()
        for report in (self._runner.acknowledge(), self._runner.step()):
            if report is not None:
                self._table.service.on_step(report)

    def round_s(self) -> float:
        """Time of the processor for some steps, each with its acknowledgements."""
        begun = time.thread_time()
        for _ in range(STEPS_A_ROUND):
            self._step_engine()
            for row in self._rows:
                self._table.service.ack(row.key, len(row.outputs), self._reader)
        took_s = time.thread_time() - begun
        self._table.events.posted.clear()
        return took_s

    def close(self) -> None:
        """Forget the metrics."""
        self._metrics.close()


def report_step_cost() -> None:
    """A line a comparison: the small case in us, and what the large one costs of it. The cases take turns."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    small = {"num_blocks": 6_000}
    for what, few, many in (
        ("100,000 free blocks to 6,000", small, {"num_blocks": 100_000}),
        ("5,000 cached blocks to none", {"num_blocks": 12_000}, {"num_blocks": 12_000, "num_cached": 5_000}),
        ("100 waiting requests to none", small, {**small, "num_waiting": 100}),
    ):
        subjects = [Subject(**few), Subject(**many)]
        rounds = [[subject.round_s() for subject in subjects] for _ in range(NUM_ROUNDS)]
        least = [min(times) / STEPS_A_ROUND for times in zip(*rounds, strict=True)]
        for subject in subjects:
            subject.close()
        print(f"step without its model  {least[0] * 1e6:6.0f} us  beside {what}: {least[1] / least[0]:.2f} x")


if __name__ == "__main__":
    report_step_cost()
