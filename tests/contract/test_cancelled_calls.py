"""CAN-05: two hundred calls to a decode worker, cancelled early, with room for eight at once: none of them stays."""

import pytest

from shared.codec.request import key_to_wire
from shared.wire import decode_pb2, decode_pb2_grpc
from tests.support.cancelled_calls import cancel_many, make_small, say_first
from tests.support.raw_sender import RawSender
from tests.support.worker_pair import key_of, scripted_spec, worker_pair

NEVER_FULL = 2_000  # tokens of 100 ms each: nobody acknowledges one, and the answer must not be parked for that


async def test_token_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is attached to an answer without an end, and cancelled after three tokens; the next is served."""
    make_small(monkeypatch)
    key = key_of("r")
    async with worker_pair(outbox_tokens=NEVER_FULL) as pair:
        reserved = await pair.place(scripted_spec("r", repeat=100_000, max_tokens=NEVER_FULL, step_ms=100))
        await pair.scheduler.event("decode-0", key, "kv_committed")
        stub = decode_pb2_grpc.DecodeStub(pair.channels.get(pair.address("decode-0")))
        attach = decode_pb2.Attach(key=key_to_wire(key), from_index=1, ticket=reserved.attach_ticket)

        async def read_three() -> None:
            call, num_tokens = stub.Tokens(), 0
            try:
                await say_first(call, decode_pb2.TokensUp(attach=attach))
                while num_tokens < 3:
                    down = await call.read()
                    assert isinstance(down, decode_pb2.TokensDown)
                    assert not down.HasField("refused"), down
                    num_tokens += sum(len(part.ids) for part in down.batch.sequences)
            finally:
                call.cancel()

        await cancel_many("/firsttoken.v1.Decode/Tokens", read_three)
        await pair.release("decode-0", key, abort=True)
        await pair.release("prefill-0", key, abort=True)


@pytest.mark.usefixtures("transport")
async def test_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is opened for the same transfer, told what decode holds, and cancelled."""
    make_small(monkeypatch)
    spec = scripted_spec("r", num_prompt_tokens=100)
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, await pair.reserve(spec))
        await sender.hello()

        async def look() -> None:
            push = await sender.open()
            try:
                assert () == await push.held()
            finally:
                push.call.cancel()

        await cancel_many("/firsttoken.v1.KvTransfer/Push", look)
        await pair.release("decode-0", key_of("r"), abort=True)
