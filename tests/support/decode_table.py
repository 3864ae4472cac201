"""The decode worker's table alone, with everything around it replaced: a test says what arrives and what a step did."""

from decode_worker.sequence import HeldSequence
from decode_worker.service import DecodeService
from shared.codec.request import key_to_wire, spec_to_wire
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, RequestKey, TokenId, WorkerId
from shared.domain.request import FinishReason, RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.decode_runner import DecodeCommand, DecodeStep, NewToken
from shared.engine.executor import SampledToken, SequenceFault
from shared.kv.block_pool import BlockPool
from shared.kv.frames import FrameHeader, FrameRange, WriteBlocks
from shared.kv.layout import KvLayout
from shared.obs.logs import get_logger
from shared.obs.metrics import Metrics
from shared.wire import scheduler_pb2
from tests.support.hand_clock import HandClock
from tests.support.worker_fakes import FakeEngine, FakeEvents

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_size=4, numerics=b"n")
EOS = TokenId(2)
FIRST = SampledToken(token_id=TokenId(50))
EPOCH = Epoch(5)
SENDER = Incarnation(3)


class Reader:
    """A stream that only counts."""

    def __init__(self) -> None:
        self.num_touched = 0

    def touch(self, sequence: HeldSequence) -> None:
        """News."""
        self.num_touched += 1

    def flush(self, sequence: HeldSequence) -> None:
        """The last news."""
        self.num_touched += 1


class Table:
    """The service with everything around it replaced."""

    def __init__(
        self, metrics: Metrics, *, num_blocks: int = 16, max_sequences: int = 4, shares_answers: bool = True
    ) -> None:
        self.metrics = metrics
        self.clock = HandClock()
        self.pool = BlockPool(num_blocks)
        self.engine: FakeEngine[DecodeCommand] = FakeEngine()
        self.events = FakeEvents()
        self.service = DecodeService(
            worker_id=WorkerId("decode-0"),
            incarnation=Incarnation(9),
            layout=LAYOUT,
            eos_ids=frozenset({EOS}),
            pool=self.pool,
            max_sequences=max_sequences,
            outbox_tokens=8,
            outbox_bytes=1024,
            shares_answers=shares_answers,
            clock=self.clock,
            metrics=metrics,
            log=get_logger("test"),
        )
        self.service.connect(self.engine, self.events, address="host:1")

    def command(self, name: str, **command: object) -> RequestKey:
        """Hand a command to the table."""
        key = RequestKey(RequestId(name), Attempt(1))
        message = scheduler_pb2.Command(key=key_to_wire(key), **command)  # pyright: ignore[reportArgumentType]
        self.service.handle_command(message, EPOCH)
        return key

    def reserve(
        self,
        name: str = "r",
        *,
        max_tokens: int = 20,
        has_stop_strings: bool = False,
        prompt: tuple[int, ...] = (7, 8, 9, 10),
        delivered: tuple[int, ...] = (),
        timeout_ms: int = 0,
    ) -> RequestKey:
        """A prompt of four tokens: one block."""
        spec = RequestSpec(
            request_id=RequestId(name),
            prompt_ids=tuple(map(TokenId, prompt)),
            max_tokens=max_tokens,
            sampling=SamplingParams(seed=1),
            has_stop_strings=has_stop_strings,
        )
        reserve = scheduler_pb2.Reserve(spec=spec_to_wire(spec), delivered_ids=delivered, timeout_ms=timeout_ms)
        return self.command(name, reserve=reserve)

    def row(self, key: RequestKey) -> HeldSequence:
        """The row, which must be there."""
        row = self.service.find(key)
        assert isinstance(row, HeldSequence)
        return row

    def begin_copy(self, key: RequestKey) -> HeldSequence:
        """The whole prompt arrives in one frame, whose copy begins."""
        row = self.row(key)
        opened = row.receiver.open(
            key=key,
            transfer_id=row.transfer_id,
            sender_incarnation=SENDER,
            receiver_incarnation=Incarnation(9),
        )
        assert opened == ()
        header = FrameHeader(
            number=1,
            key=key,
            transfer_id=row.transfer_id,
            sender_incarnation=SENDER,
            range=FrameRange(layer_start=0, layer_end=1, token_start=0, token_end=4),
            crc32=0,
        )
        write = row.receiver.accept(header, payload_crc32=0, num_payload_bytes=LAYOUT.block_bytes)
        assert isinstance(write, WriteBlocks)
        return row

    def end_copy(self, row: HeldSequence) -> None:
        """The copy returns."""
        row.receiver.copied(1)
        self.service.copy_returned(row, LAYOUT.block_bytes)

    def running(self, key: RequestKey) -> HeldSequence:
        """Bring a reservation into the batch, token 1 being 50."""
        row = self.begin_copy(key)
        self.end_copy(row)
        assert self.service.take_first_token(row, FIRST, 0) is None
        self.step(joined=(key,))
        return row

    def step(
        self,
        *,
        joined: tuple[RequestKey, ...] = (),
        tokens: tuple[NewToken, ...] = (),
        faults: dict[RequestKey, SequenceFault] | None = None,
        left: tuple[RequestKey, ...] = (),
        replayed: dict[RequestKey, int] | None = None,
    ) -> None:
        """The engine's report."""
        self.service.on_step(
            DecodeStep(
                joined=joined,
                tokens=tokens,
                faults=faults or {},
                left=left,
                num_sequences=len(tokens),
                replayed=replayed or {},
            )
        )


def token(key: RequestKey, index: int, finish: FinishReason | None = None) -> NewToken:
    """Output token `index`."""
    return NewToken(key=key, index=index, sampled=SampledToken(token_id=TokenId(50 + index)), finish=finish)
