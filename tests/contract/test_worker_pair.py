"""A real prefill worker and a real decode worker, over loopback gRPC: answers, faults, gateways, sessions."""

import pytest

from shared.domain.ids import RequestKey
from shared.domain.refusals import RefusedKind
from shared.obs.metrics import KV_TRANSFER_BYTES_TOTAL
from shared.process import Process
from shared.wire import common_pb2, scheduler_pb2
from tests.support import ports
from tests.support.metrics import parse
from tests.support.polling import eventually
from tests.support.refusals import refused
from tests.support.stepped import SteppedExecutor
from tests.support.worker_pair import (
    EPOCH,
    FakeGateway,
    WorkerPair,
    expected_ids,
    key_of,
    scripted_engine,
    scripted_spec,
    worker_pair,
)

LONG_S = 120.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """Who waits here for the test's next word, on however slow a machine, is not given up in the meantime."""
    monkeypatch.setattr("decode_worker.lapse.PARKED_S", LONG_S)
    monkeypatch.setattr("shared.rpc.worker_life.DEAD_LINGER_S", LONG_S)


async def _attached(pair: WorkerPair, key: RequestKey, reserved: scheduler_pb2.Reserved) -> FakeGateway:
    gateway = await pair.gateway()
    await gateway.attach(key, reserved.attach_ticket)
    return gateway


@pytest.mark.usefixtures("transport")
async def test_a_whole_answer_crosses_both_workers() -> None:
    """Token for token, with the end once, SequenceDone after the last acknowledgement, every block free afterwards."""
    spec = scripted_spec("r", ["a", "b", "c"], repeat=20, num_prompt_tokens=200)
    key = key_of("r")
    async with worker_pair() as pair:
        gateway = await _attached(pair, key, await pair.place(spec))
        await gateway.ended(key)
        done = (await pair.scheduler.event("decode-0", key, "sequence_done")).sequence_done

        assert expected_ids(spec) == gateway.ids["r"]
        assert gateway.ends["r"].index == done.completion_tokens == 61
        assert done.finish_reason == common_pb2.FINISH_REASON_STOP
        names = [event.WhichOneof("event") for event in pair.scheduler.events("decode-0", key)]
        assert names == ["reserved", "kv_committed", "sequence_done"]
        await pair.scheduler.idle("decode-0", 1024)
        await pair.scheduler.idle("prefill-0", 1024)
        assert (await pair.release("decode-0", key)).blocks_freed == 0
        released = await pair.release("prefill-0", key)
        assert (released.blocks_freed, released.computed_tokens) == (0, 200)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("num_prompt_tokens", [47, 48, 49, 63, 64, 65, 128])
async def test_prompts_around_block_and_chunk_borders(num_prompt_tokens: int) -> None:
    """PDX-02: a prompt that fills its last block exactly needs no more and no fewer blocks than any other."""
    spec = scripted_spec("r", ["a", "b"], repeat=10, max_tokens=20, num_prompt_tokens=num_prompt_tokens)
    key = key_of("r")
    async with worker_pair() as pair:
        gateway = await _attached(pair, key, await pair.place(spec))
        await gateway.ended(key)

        assert expected_ids(spec) == gateway.ids["r"]
        committed = (await pair.scheduler.event("decode-0", key, "kv_committed")).kv_committed
        assert committed.bytes == -(-num_prompt_tokens // 16) * scripted_engine(1).memory.layout.block_bytes


@pytest.mark.usefixtures("transport")
async def test_an_answer_of_one_token_needs_no_kv() -> None:
    """Token 1 can be the last: the answer ends with it, the frames are refused, and nothing stays."""
    spec = scripted_spec("r", max_tokens=1)
    key = key_of("r")
    async with worker_pair() as pair:
        gateway = await _attached(pair, key, await pair.place(spec))
        done = (await pair.scheduler.event("decode-0", key, "sequence_done")).sequence_done

        assert expected_ids(spec) == gateway.ids["r"]
        assert (done.finish_reason, done.completion_tokens) == (common_pb2.FINISH_REASON_LENGTH, 1)
        await pair.scheduler.idle("decode-0", 1024)
        await pair.scheduler.idle("prefill-0", 1024)


@pytest.mark.usefixtures("transport")
async def test_many_answers_at_once_share_steps() -> None:
    """Several sequences decode in one step, every answer is its own, and the stream gets a batch a step."""
    specs = [scripted_spec(f"r{n}", [f"<{n}>", "x", str(n)], repeat=10) for n in range(12)]
    steps = SteppedExecutor(1024)
    async with worker_pair(decode_engine=steps.engine) as pair:
        gateway = await pair.gateway()
        for spec in specs:
            reserved = await pair.place(spec)
            await gateway.attach(key_of(spec.request_id), reserved.attach_ticket)
        await pair.scheduler.idle("prefill-0", 1024)  # all of them are with decode, whose first step still waits
        steps.run_on()
        for spec in specs:
            await gateway.ended(key_of(spec.request_id))

        for spec in specs:
            assert expected_ids(spec) == gateway.ids[spec.request_id]
        assert len(specs) == len(steps.begun[1])
        assert gateway.num_batches <= len(specs) + len(steps.begun)  # token 1 of each, then a batch a step


# ---- refusals and failures


async def test_a_reservation_that_does_not_fit_is_refused() -> None:
    """With what it needs and what is free; it takes nothing."""
    async with worker_pair(decode_engine=scripted_engine(8)) as pair:
        spec = scripted_spec("r", num_prompt_tokens=40, max_tokens=60)
        await pair.reserve(scripted_spec("small", num_prompt_tokens=64, max_tokens=16))
        await pair.ask(spec)
        refused = (await pair.scheduler.event("decode-0", key_of("r"), "reserve_refused")).reserve_refused

        assert (refused.needed_blocks, refused.free_blocks) == (4, 3)
        assert (await pair.release("decode-0", key_of("small"), abort=True)).blocks_freed == 5
        assert await pair.reserve(spec, attempt=2)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize(("fail_at", "worker_id"), [(1, "prefill-0"), (3, "decode-0")])
async def test_a_fault_in_the_engine_fails_that_attempt_alone(fail_at: int, worker_id: str) -> None:
    """The failed one is reported by the worker where it broke and frees its blocks there; its neighbour is served."""
    bad = scripted_spec("bad", fail_at=fail_at, step_ms=5, repeat=10)
    good = scripted_spec("good", step_ms=5, repeat=10)
    async with worker_pair() as pair:
        gateway = await pair.gateway()
        for spec in (bad, good):
            reserved = await pair.place(spec)
            await gateway.attach(key_of(spec.request_id), reserved.attach_ticket)
        failed = (await pair.scheduler.event(worker_id, key_of("bad"), "attempt_failed")).attempt_failed
        await gateway.ended(key_of("good"))

        assert failed.error.code == "INTERNAL"
        assert expected_ids(good) == gateway.ids["good"]
        for worker in ("prefill-0", "decode-0"):
            await pair.release(worker, key_of("bad"), abort=True)
            await pair.release(worker, key_of("good"))
        for worker in ("prefill-0", "decode-0"):
            await pair.scheduler.idle(worker, 1024)


async def test_a_dead_engine_fails_what_ran_and_takes_nothing_more() -> None:
    """OPS-02: not ready, not alive, the running attempt told as failed, its blocks free, and the next one refused."""
    engine = scripted_engine(1024)
    spec = scripted_spec("r", ["a"], repeat=1000, step_ms=10)
    key = key_of("r")
    async with worker_pair(decode_engine=engine, survives_engine_death=True) as pair:
        gateway = await _attached(pair, key, await pair.place(spec))
        await gateway.until(lambda: len(gateway.ids["r"]) >= 2)
        engine.executor.decode = _broken  # pyright: ignore[reportAttributeAccessIssue]
        failed = (await pair.scheduler.event("decode-0", key, "attempt_failed")).attempt_failed
        for name in ("second", "third"):
            await pair.place(scripted_spec(name))
            await pair.scheduler.event("decode-0", key_of(name), "attempt_failed")

        assert failed.error.code == "INTERNAL"
        await pair.scheduler.until(lambda: any(beat.draining for beat in pair.scheduler.heartbeats("decode-0")))
        assert pair.decode.readiness.is_ready is False
        assert pair.decode.readiness.reason == "the engine thread has died"
        await pair.ask(scripted_spec("next"))
        await pair.scheduler.event("decode-0", key_of("next"), "reserve_refused")
        await pair.scheduler.idle("decode-0", 1024)


def _broken(rows: object) -> list[object]:
    raise MemoryError("no memory for a step")


# ---- gateways


async def test_a_full_outbox_stops_the_sequence_and_room_lets_it_go_on() -> None:
    """Without acknowledgements a sequence computes what its outbox holds and keeps its blocks; then it goes on, exactly."""
    spec = scripted_spec("r", ["a", "b", "c"], repeat=30)
    key = key_of("r")
    async with worker_pair(outbox_tokens=8) as pair:
        gateway = await pair.gateway()
        gateway.acks_at_once = False
        reserved = await pair.place(spec)
        await gateway.attach(key, reserved.attach_ticket)
        await gateway.until(lambda: len(gateway.ids["r"]) == 8)
        other = scripted_spec("other", repeat=20)
        gateway_2 = await pair.gateway()
        await gateway_2.attach(key_of("other"), (await pair.place(other)).attach_ticket)
        await gateway_2.ended(key_of("other"))

        assert len(gateway.ids["r"]) == 8
        assert (await _blocks(pair))["active"] > 0
        gateway.acks_at_once = True
        await gateway.ack(key, 8)
        await gateway.ended(key)
        assert expected_ids(spec) == gateway.ids["r"]


async def _blocks(pair: WorkerPair) -> dict[str, int]:
    """By the next heartbeat."""
    num_told = len(pair.scheduler.heartbeats("decode-0"))
    await pair.scheduler.until(lambda: len(pair.scheduler.heartbeats("decode-0")) > num_told)
    return dict(pair.scheduler.heartbeats("decode-0")[-1].blocks)


async def test_with_stop_strings_few_tokens_are_computed_ahead() -> None:
    """At most four beyond the acknowledged ones: what lies beyond a stop string is wasted."""
    spec = scripted_spec("r", ["a", "b", "c"], repeat=30, has_stop_strings=True)
    key = key_of("r")
    async with worker_pair() as pair:
        gateway = await pair.gateway()
        gateway.acks_at_once = False
        await gateway.attach(key, (await pair.place(spec)).attach_ticket)
        await gateway.until(lambda: len(gateway.ids["r"]) == 4)
        await gateway.ack(key, 2)
        await gateway.until(lambda: len(gateway.ids["r"]) == 6)
        await gateway.finish(key, 5)
        done = (await pair.scheduler.event("decode-0", key, "sequence_done")).sequence_done

        assert (done.finish_reason, done.completion_tokens) == (common_pb2.FINISH_REASON_STOP, 5)
        await pair.scheduler.idle("decode-0", 1024)
        assert (await pair.release("decode-0", key)).computed_tokens == 5


async def test_a_reader_that_attaches_again_gets_the_rest_and_the_first_gets_no_more() -> None:
    """A second gateway stream takes over at the index that it names; what the first says afterwards does not count."""
    spec = scripted_spec("r", ["a", "b", "c"], repeat=20, step_ms=5)
    key = key_of("r")
    async with worker_pair(outbox_tokens=8) as pair:  # the end is not made before the second one reads
        first = await pair.gateway()
        first.acks_at_once = False
        reserved = await pair.place(spec)
        await first.attach(key, reserved.attach_ticket)
        await first.until(lambda: len(first.ids["r"]) >= 5)
        await first.ack(key, 3)
        second = await pair.gateway()
        second.ids["r"] = first.ids["r"][:4]
        await second.attach(key, reserved.attach_ticket, from_index=5)
        await second.until(lambda: len(second.ids["r"]) > 5)
        await first.ack(key, 5)
        await first.finish(key, 4)
        await second.ended(key)

        assert expected_ids(spec) == second.ids["r"]
        assert "r" not in first.ends


async def test_answers_on_two_streams_do_not_mix() -> None:
    """Each gateway gets its own sequences, although they share every step."""
    specs = [scripted_spec(name, [name, "x"], repeat=20, step_ms=3) for name in ("r1", "r2")]
    async with worker_pair() as pair:
        gateways = [await pair.gateway() for _ in specs]
        for spec, gateway in zip(specs, gateways, strict=True):
            await gateway.attach(key_of(spec.request_id), (await pair.place(spec)).attach_ticket)
        for spec, gateway in zip(specs, gateways, strict=True):
            await gateway.ended(key_of(spec.request_id))

            assert list(gateway.ids) == [spec.request_id]
            assert expected_ids(spec) == gateway.ids[spec.request_id]


async def test_attach_needs_the_ticket_and_an_attempt() -> None:
    """A wrong ticket, an unknown attempt, an older session are refused by name on a stream that goes on serving others.

    Each with the session that was refused: on the same stream a newer one may read the same attempt.
    """
    spec = scripted_spec("r")
    key = key_of("r")
    async with worker_pair() as pair:
        reserved = await pair.place(spec)
        gateway = await pair.gateway()
        await gateway.attach(key, b"x" * len(reserved.attach_ticket))
        await gateway.attach(key_of("r", attempt=2), reserved.attach_ticket)
        await gateway.attach(key, reserved.attach_ticket, session=2)
        await gateway.attach(key, reserved.attach_ticket, session=1)
        await gateway.until(lambda: len(gateway.refused) == 3)
        await gateway.ended(key)

        assert [(refused.error.code, refused.session) for refused in gateway.refused] == [
            ("PERMISSION_DENIED", 0),
            ("REQUEST_NOT_FOUND", 0),
            ("SUPERSEDED", 1),
        ]


# ---- the session


async def test_unacknowledged_events_come_first_on_a_new_session() -> None:
    """Hello, then the events again under their numbers, then the inventory; acknowledged ones do not come again."""
    async with worker_pair() as pair:
        scheduler = pair.scheduler
        await pair.reserve(scripted_spec("told"))
        scheduler.acknowledges = False
        await pair.reserve(scripted_spec("owed"))
        num_hellos = len(scheduler.hellos)
        scheduler.acknowledges = True
        await scheduler.hang_up("decode-0")
        await scheduler.until(
            lambda: len(scheduler.hellos) > num_hellos and len(scheduler.sessions["decode-0"][-1]) >= 2
        )
        event, inventory = scheduler.sessions["decode-0"][-1][:2]

        assert event.event.key.request_id == "owed"
        assert event.event.number == 2
        held = {entry.key.request_id: entry.sequence_state for entry in inventory.inventory.entries}
        assert held == {"told": "waiting_kv", "owed": "waiting_kv"}
        assert scheduler.hellos[num_hellos].scheduler_epoch == EPOCH


async def test_a_scheduler_of_an_older_epoch_is_refused() -> None:
    """The worker leaves it at once, counts it, and obeys the next one whose epoch is not below the highest seen."""
    async with worker_pair() as pair:
        scheduler = pair.scheduler
        num_hellos = len(scheduler.hellos)
        scheduler.next_epochs = [EPOCH - 1, EPOCH + 1]
        await scheduler.hang_up("decode-0")
        await scheduler.until(lambda: len(scheduler.hellos) >= num_hellos + 2)
        await pair.ask(scripted_spec("r"))
        reserved = await scheduler.event("decode-0", key_of("r"), "reserved")

        assert [hello.scheduler_epoch for hello in scheduler.hellos[num_hellos:]] == [EPOCH, EPOCH]
        assert reserved.scheduler_epoch == EPOCH + 1
        assert {RefusedKind.STALE_EPOCH: 1} == refused(pair.decode.metrics)


async def test_a_worker_that_is_told_to_stop_finishes_what_it_has() -> None:
    """Draining is told at once, new work is refused, the running answer ends in full, then the worker leaves."""
    spec = scripted_spec("r", ["a"], repeat=40)
    key = key_of("r")
    async with worker_pair(drain_timeout_s=LONG_S, outbox_tokens=8) as pair:
        gateway = await pair.gateway()
        gateway.acks_at_once = False  # until the next one is refused: what has ended leaves at once
        await gateway.attach(key, (await pair.place(spec)).attach_ticket)
        await gateway.until(lambda: len(gateway.ids["r"]) == 8)
        pair.decode.stopping.set()
        await pair.scheduler.until(lambda: any(beat.draining for beat in pair.scheduler.heartbeats("decode-0")))
        await pair.ask(scripted_spec("next"))
        await pair.scheduler.event("decode-0", key_of("next"), "reserve_refused")
        gateway.acks_at_once = True
        await gateway.ack(key, 8)
        await gateway.ended(key)

        assert expected_ids(spec) == gateway.ids["r"]
        await pair.scheduler.event("decode-0", key, "sequence_done")


async def test_a_preempted_answer_goes_on_by_replay() -> None:
    """Two answers that together need more blocks than there are: the younger leaves, and is continued exactly."""
    specs = [scripted_spec(name, ["a", "b", "c"], repeat=99, eos=False, max_tokens=120) for name in ("old", "young")]
    num_blocks = -(-specs[0].max_total_tokens // 16) + 4
    steps = SteppedExecutor(num_blocks)
    async with worker_pair(decode_engine=steps.engine) as pair:
        gateway = await pair.gateway()
        for spec in specs:
            reserved = await pair.place(spec)
            await gateway.attach(key_of(spec.request_id), reserved.attach_ticket)
        await pair.scheduler.idle("prefill-0", 1024)  # both are with decode, whose first step still waits
        steps.run_on()
        await pair.scheduler.event("decode-0", key_of("young"), "preempted")
        for worker_id in ("decode-0", "prefill-0"):
            await pair.release(worker_id, key_of("young"), abort=True)
        await gateway.ended(key_of("old"))
        delivered = list(gateway.ids["young"])
        assert 0 < len(delivered) < 120
        reserved = await pair.place(specs[1], attempt=2, delivered=delivered)
        await gateway.attach(key_of("young", 2), reserved.attach_ticket, from_index=len(delivered) + 1)
        await gateway.ended(key_of("young"))

        assert {spec.request_id: expected_ids(spec) for spec in specs} == gateway.ids
        done = (await pair.scheduler.event("decode-0", key_of("young", 2), "sequence_done")).sequence_done
        assert done.completion_tokens == 120
        for name, attempt in (("old", 1), ("young", 2)):
            await pair.release("decode-0", key_of(name, attempt))
        await pair.scheduler.idle("decode-0", num_blocks)


@pytest.mark.parametrize(("role", "num_starts"), [("prefill", 20), ("decode", 6)])
async def test_a_worker_is_started_again_and_again_at_one_address(role: str, num_starts: int) -> None:
    """PDX-05: each start breaks off in mid-copy; the next one's first request is exact, and the peer lives through all."""
    port, other = ports.gateway_port(), "decode-0" if role == "prefill" else "prefill-0"
    running = scripted_spec("running", ["a", "b", "c"], repeat=30, step_ms=50)
    async with worker_pair(with_prefill=role == "decode", with_decode=role == "prefill") as pair:
        reader: FakeGateway | None = None
        for number in range(num_starts):
            spec = scripted_spec(f"r{number}")
            cut = scripted_spec(f"cut{number}", [f"{number}"], num_prompt_tokens=900, prefill_ms=1_500)
            async with pair.another_start(role, port=port) as process:
                if reader is None or role == "decode":  # its stream ends with the worker
                    reader = await pair.gateway()
                if number == 0 and role == "prefill":
                    await reader.attach(key_of("running"), (await pair.place(running)).attach_ticket)
                    await pair.scheduler.event("decode-0", key_of("running"), "kv_committed")
                await reader.attach(key_of(f"r{number}"), (await pair.place(spec)).attach_ticket)
                await reader.ended(key_of(f"r{number}"))
                assert expected_ids(spec) == reader.ids[f"r{number}"]
                sender = process if role == "prefill" else pair.prefill
                before = await _kv_sent(sender)
                await pair.place(cut)
                await eventually(
                    lambda sender=sender: _kv_sent(sender),
                    lambda sent, before=before: sent > before,
                    within_s=60.0,
                    what="the prompt is being copied",
                )
            await pair.release(other, key_of(f"r{number}"))
            await pair.release(other, key_of(f"cut{number}"), abort=True)
        if role == "prefill":
            assert reader is not None
            await reader.ended(key_of("running"))
            assert expected_ids(running) == reader.ids["running"]
            await pair.release("decode-0", key_of("running"))
        await pair.scheduler.idle(other, 1024)


async def _kv_sent(process: Process) -> float:
    """Bytes, since its start."""
    return parse(process.metrics.render().decode()).total(KV_TRANSFER_BYTES_TOTAL)
