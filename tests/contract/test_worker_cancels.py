"""A cancel in each stage of an attempt, on real workers: who lets go of what, and when."""

import pytest

from shared.wire import scheduler_pb2
from tests.support.stepped import SteppedExecutor
from tests.support.worker_pair import WorkerPair, expected_ids, key_of, scripted_spec, worker_pair

KEY = key_of("r")


def _names(pair: WorkerPair, worker_id: str) -> list[str | None]:
    return [event.WhichOneof("event") for event in pair.scheduler.events(worker_id, KEY)]


async def test_of_a_reservation() -> None:
    """Nothing has arrived yet: the blocks for prompt and first tokens are free at once; asked again there is nothing left."""
    spec = scripted_spec("r", max_tokens=100, num_prompt_tokens=60)
    async with worker_pair() as pair:
        await pair.reserve(spec)
        released = await pair.release("decode-0", KEY, abort=True)

        assert released.blocks_freed == 5
        await pair.scheduler.send("decode-0", KEY, abort=scheduler_pb2.Abort())
        await pair.scheduler.until(lambda: len(pair.scheduler.events("decode-0", KEY)) == 3)
        assert pair.scheduler.events("decode-0", KEY)[2].released.blocks_freed == 0
        await pair.scheduler.idle("decode-0", 1024)


@pytest.mark.usefixtures("transport")
async def test_while_prefill_computes() -> None:
    """Prefill stops at the next chunk border, and both sides give back what they held."""
    spec = scripted_spec("r", max_tokens=4, num_prompt_tokens=200)
    steps = SteppedExecutor(1024)
    async with worker_pair(prefill_engine=steps.engine) as pair:
        await pair.place(spec)
        steps.permit(1)
        await steps.has_begun(2)
        await pair.scheduler.send("prefill-0", KEY, abort=scheduler_pb2.Abort())
        await pair.all_taken("prefill-0")
        assert [] == _names(pair, "prefill-0")
        steps.run_on()
        at_prefill = (await pair.scheduler.event("prefill-0", KEY, "released")).released
        at_decode = await pair.release("decode-0", KEY, abort=True)

        assert at_prefill.blocks_freed == at_decode.blocks_freed == 13
        assert 2 * 64 == at_prefill.computed_tokens
        assert ["released"] == _names(pair, "prefill-0")
        assert [["r"], ["r"]] == steps.begun


async def test_of_a_prompt_that_waits_for_blocks() -> None:
    """It holds none, so none are freed; the one before it is not concerned, the one behind it gets its turn."""
    steps = SteppedExecutor(16)
    async with worker_pair(prefill_engine=steps.engine) as pair:
        specs = [scripted_spec(name, num_prompt_tokens=200) for name in ("first", "second", "third")]
        gateway = await pair.gateway()
        for spec in specs:
            reserved = await pair.place(spec)
            await gateway.attach(key_of(spec.request_id), reserved.attach_ticket)
        released = await pair.release("prefill-0", key_of("second"), abort=True)

        assert (released.blocks_freed, released.computed_tokens) == (0, 0)
        steps.run_on()
        await gateway.ended(key_of("first"))
        await gateway.ended(key_of("third"))
        assert expected_ids(specs[2]) == gateway.ids["third"]
        assert (await pair.release("decode-0", key_of("second"), abort=True)).blocks_freed > 0


async def test_while_decoding() -> None:
    """The engine lets go at the border of a step; then the blocks are free, and no token comes any more."""
    spec = scripted_spec("r", ["a"], repeat=1000, num_prompt_tokens=60, max_tokens=900)
    steps = SteppedExecutor(1024)
    async with worker_pair(decode_engine=steps.engine) as pair:
        gateway = await pair.gateway()
        await gateway.attach(KEY, (await pair.place(spec)).attach_ticket)
        steps.permit(4)
        await gateway.until(lambda: len(gateway.ids["r"]) == 5)
        await steps.has_begun(5)
        await pair.scheduler.send("decode-0", KEY, abort=scheduler_pb2.Abort())
        await pair.all_taken("decode-0")
        assert ["reserved", "kv_committed"] == _names(pair, "decode-0")
        steps.run_on()
        released = (await pair.scheduler.event("decode-0", KEY, "released")).released

        assert 5 <= released.blocks_freed <= 7  # prompt and some tokens, and not what 900 tokens would need
        assert 5 == released.computed_tokens  # token 1 came from prefill, the last one in the step that was under way
        assert ["reserved", "kv_committed", "released"] == _names(pair, "decode-0")
        assert 5 == len(steps.begun)
        assert 5 == len(gateway.ids["r"])
        await pair.scheduler.idle("decode-0", 1024)


async def test_of_what_was_never_here_leaves_a_tombstone() -> None:
    """An Abort that overtakes its Reserve is answered at once, and the Reserve is refused when it comes."""
    spec = scripted_spec("r")
    async with worker_pair() as pair:
        assert (await pair.release("decode-0", KEY, abort=True)).blocks_freed == 0
        await pair.scheduler.send("decode-0", KEY, reserve=scheduler_pb2.Reserve())
        await pair.reserve(scripted_spec("other"))

        assert ["released"] == _names(pair, "decode-0")
        assert await pair.reserve(spec, attempt=2)
