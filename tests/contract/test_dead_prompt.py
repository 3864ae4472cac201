"""CAN-02: what prefill still computes for a prompt whose client has gone, in chunks and not in seconds."""

from shared.wire import scheduler_pb2
from tests.support.stepped import SteppedExecutor
from tests.support.worker_pair import expected_ids, key_of, scripted_spec, worker_pair


async def test_the_next_prompt_waits_for_the_chunk_under_way_and_no_other() -> None:
    """Cancelled in the fourth of twenty-one chunks: there is no fifth; the short prompt's chunk is next, and decode is sent
    nothing more.
    """
    steps = SteppedExecutor(1024)
    dead, short = scripted_spec("dead", num_prompt_tokens=1_300), scripted_spec("short", max_tokens=10)
    async with worker_pair(prefill_engine=steps.engine) as pair:
        await pair.place(dead)
        steps.permit(3)
        await steps.has_begun(4)
        for worker in ("prefill-0", "decode-0"):
            await pair.scheduler.send(worker, key_of("dead"), abort=scheduler_pb2.Abort())
        reserved = await pair.place(short)
        await pair.all_taken("prefill-0")
        steps.run_on()
        gateway = await pair.gateway()
        await gateway.attach(key_of("short"), reserved.attach_ticket)
        await gateway.ended(key_of("short"))
        released = await pair.scheduler.event("prefill-0", key_of("dead"), "released")
        await pair.scheduler.event("decode-0", key_of("dead"), "released")
        told = [event.WhichOneof("event") for event in pair.scheduler.events("decode-0", key_of("dead"))]

        assert [*[["dead"]] * 4, ["short"]] == steps.begun
        assert 4 * 64 == released.released.computed_tokens
        assert ["reserved", "released"] == told
        assert expected_ids(short) == gateway.ids["short"]
