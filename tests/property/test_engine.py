"""Both runners, the frames between them and the pools, in any order of events: every answer exact, every block back.

One prefill side with a prefix cache and one decode side, without threads: hypothesis chooses when prompts come, when steps run, when frames
move, when credit is given, who leaves. After every step the pools are whole, and at the end they are empty.
"""

import json
import zlib
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.errors import ErrorCode
from shared.domain.ids import Attempt, Incarnation, RequestId, RequestKey, TokenId, TransferId
from shared.domain.request import FinishReason, RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.decode_runner import DecodeRunner, DecodeSequence, DecodeStep, Grant, Join, Leave
from shared.engine.kv_digest import digest_layout
from shared.engine.prefill_runner import AddPrompt, DropPrompt, PrefillRunner, PrefillStep
from shared.engine.scripted import ScriptedExecutor
from shared.kv.block_pool import BlockPool, BlockState
from shared.kv.block_table import BlockTable
from shared.kv.frame_plan import plan_frames
from shared.kv.frames import FrameHeader, FrameReceiver, Reject, WriteBlocks
from shared.kv.memory import KvMemory
from shared.kv.prefix_cache import PrefixCache
from shared.text.script import Script

BLOCK_SIZE = 4
NUM_BLOCKS = 160
LAYOUT = digest_layout(BLOCK_SIZE)
ENDPOINTS = (Incarnation(1), Incarnation(2))


class _Clock:
    def monotonic(self) -> float:
        return 0.0

    def unix_ms(self) -> int:
        return 0


@dataclass
class _Life:
    """One sequence and what became of it."""

    spec: RequestSpec
    source: BlockTable
    target: BlockTable
    receiver: FrameReceiver
    chunks: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    tokens: list[int] = field(default_factory=list[int])
    upto: int = 3
    has_joined: bool = False
    finish: FinishReason | None = None
    fault: ErrorCode | None = None
    is_gone: bool = False


class _Line:
    """Prefill and decode side by side; every method is one event."""

    def __init__(self) -> None:
        self.pools = [BlockPool(NUM_BLOCKS), BlockPool(NUM_BLOCKS)]
        self.prefixes = PrefixCache(self.pools[0], BLOCK_SIZE)
        self.memories = [KvMemory(LAYOUT, NUM_BLOCKS), KvMemory(LAYOUT, NUM_BLOCKS)]
        self.executors = [ScriptedExecutor(memory, chunk_tokens=16, clock=_Clock()) for memory in self.memories]
        self.prefill = PrefillRunner(self.executors[0], token_budget=32, max_sequences=4)
        self.decode = DecodeRunner(self.executors[1])
        self.lives: dict[RequestKey, _Life] = {}

    def add(self, script: str, max_tokens: int) -> None:
        """A request comes, if both pools have room."""
        name = f"r{len(self.lives)}"
        key = RequestKey(RequestId(name), Attempt(1))
        spec = RequestSpec(
            request_id=key.request_id,
            prompt_ids=tuple(TokenId(byte) for byte in script.encode()),
            max_tokens=max_tokens,
            sampling=SamplingParams(seed=0),
            kv_salt=len(self.lives) % 2,
        )
        num_blocks = (LAYOUT.num_blocks_for(spec.num_prompt_tokens), LAYOUT.num_blocks_for(spec.max_total_tokens))
        if any(pool.num_available < count for pool, count in zip(self.pools, num_blocks, strict=True)):
            return
        cached = self.prefixes.match(spec.prompt_ids, salt=spec.kv_salt, max_tokens=spec.num_prompt_tokens - 1)
        new = self.pools[0].reserve(num_blocks[0] - len(cached)) or ()
        self.pools[0].activate(new)
        source = BlockTable((*cached, *new), BLOCK_SIZE)
        target = BlockTable(self.pools[1].reserve(num_blocks[1]) or (), BLOCK_SIZE)
        receiver = FrameReceiver(
            layout=LAYOUT,
            key=key,
            transfer_id=TransferId(7),
            receiver_incarnation=ENDPOINTS[1],
            num_prompt_tokens=spec.num_prompt_tokens,
            block_table=target,
        )
        receiver.open(
            key=key,
            transfer_id=TransferId(7),
            sender_incarnation=ENDPOINTS[0],
            receiver_incarnation=ENDPOINTS[1],
        )
        start = len(cached) * BLOCK_SIZE
        life = self.lives[key] = _Life(spec=spec, source=source, target=target, receiver=receiver)
        if start:
            life.chunks.append((0, start))
        self.prefill.apply(AddPrompt(key=key, spec=spec, block_table=source, start=start))

    def step(self) -> None:
        """A border and a step on both sides."""
        for report in (self.prefill.acknowledge(), self.prefill.step()):
            if report is not None:
                self._take_prefill(report)
        for report in (self.decode.acknowledge(), self.decode.step()):
            if report is not None:
                self._take_decode(report)
        self.prefixes.check_integrity()
        self.pools[1].check_integrity()

    def move(self, key: RequestKey, *, damage: bool) -> None:
        """The KV of the oldest unsent chunk moves; with the first token too, the sequence joins."""
        life = self.lives[key]
        if life.is_gone or life.has_joined:
            return
        if life.chunks:
            self._send(key, life, *life.chunks.pop(0), damage=damage)
        if life.receiver.is_complete and life.tokens and life.finish is None:
            life.has_joined = True
            self.pools[1].activate(life.target.block_ids)
            self.decode.apply(
                Join(
                    sequence=DecodeSequence(
                        key=key,
                        spec=life.spec,
                        block_table=life.target,
                        outputs=(TokenId(life.tokens[0]),),
                        may_compute_upto=life.upto,
                    )
                )
            )

    def grant(self, key: RequestKey, more: int) -> None:
        """The reader has taken some."""
        life = self.lives[key]
        life.upto = max(life.upto, len(life.tokens) + more)
        self.decode.apply(Grant(key=key, upto_index=life.upto, block_table=life.target))

    def cancel(self, key: RequestKey) -> None:
        """Both sides let go; the blocks return at the next border."""
        if not self.lives[key].is_gone:
            self.prefill.apply(DropPrompt(key=key))
            self.decode.apply(Leave(key=key))

    def _send(self, key: RequestKey, life: _Life, start: int, end: int, *, damage: bool) -> None:
        for number, frame in enumerate(plan_frames(LAYOUT, start, end, max_payload_bytes=LAYOUT.block_bytes * 3)):
            payload = self.memories[0].read(
                life.source.blocks_of(frame.token_start, frame.token_end),
                layer_start=frame.layer_start,
                layer_end=frame.layer_end,
                num_tokens=frame.token_end - frame.token_start,
            )
            if damage:  # before the checksum: what a broken sender would do, and only the commit can find
                payload = bytes((payload[0] ^ 1,)) + payload[1:]
            verdict = life.receiver.accept(
                FrameHeader(
                    number=number + 1,
                    key=key,
                    transfer_id=TransferId(7),
                    sender_incarnation=ENDPOINTS[0],
                    range=frame,
                    crc32=zlib.crc32(payload),
                ),
                payload_crc32=zlib.crc32(payload),
                num_payload_bytes=len(payload),
            )
            assert not isinstance(verdict, Reject)
            if isinstance(verdict, WriteBlocks):
                self.memories[1].write(verdict.block_ids, layer_start=0, layer_end=4, payload=payload)
                life.receiver.copied(verdict.number)

    def _take_prefill(self, report: PrefillStep) -> None:
        assert report.num_sequences <= 4
        for chunk in report.chunks:
            life = self.lives[chunk.key]
            if chunk.end > chunk.start:
                life.chunks.append((chunk.start, chunk.end))
            if not life.is_gone:
                computed = life.spec.prompt_ids[: chunk.end]
                self.prefixes.insert(computed, salt=life.spec.kv_salt, block_ids=life.source.block_ids)
        for key, sampled in report.first_tokens.items():
            life = self.lives[key]
            token = sampled.token_id
            life.tokens.append(token)
            script = Script.from_prompt(life.spec.prompt_ids)
            if token in self.executors[1].eos_ids:
                life.finish = FinishReason.STOP
            elif life.spec.max_tokens == 1:
                life.finish = FinishReason.LENGTH
            assert token == script.token_id(1)
            if life.finish is not None:
                self._let_go(key)
        for key, fault in report.faults.items():
            self.lives[key].fault = fault.code
            self._let_go(key)

    def _take_decode(self, report: DecodeStep) -> None:
        for new in report.tokens:
            life = self.lives[new.key]
            assert not life.is_gone
            assert len(life.tokens) + 1 == new.index <= life.upto
            life.tokens.append(new.sampled.token_id)
            if new.finish is not None:
                life.finish = new.finish
                self._let_go(new.key)
        for key, fault in report.faults.items():
            self.lives[key].fault = fault.code
            self._let_go(key)
        for key in report.left:
            self._let_go(key)

    def _let_go(self, key: RequestKey) -> None:
        life = self.lives[key]
        if not life.is_gone:
            life.is_gone = True
            life.receiver.end()
            self.pools[0].free(life.source.block_ids)
            self.pools[1].free(life.target.block_ids)


SCRIPTS = st.fixed_dictionaries(
    {
        "pieces": st.lists(st.sampled_from(["a", "bc", "d"]), min_size=1, max_size=3),
        "repeat": st.integers(1, 4),
        "eos": st.booleans(),
        "fail_at": st.one_of(st.none(), st.integers(1, 9)),
    }
).map(json.dumps)
ADDS = st.tuples(st.just("add"), SCRIPTS, st.integers(1, 12))
EVENTS = st.lists(
    st.one_of(
        ADDS,
        st.tuples(st.just("step")),
        st.tuples(st.just("step")),
        st.tuples(st.just("step")),
        st.tuples(st.just("move"), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("grant"), st.integers(0, 5), st.integers(0, 5)),
        st.tuples(st.just("cancel"), st.integers(0, 5)),
    ),
    min_size=15,
    max_size=60,
)


def _happen(line: _Line, event: tuple[object, ...], cancelled: set[RequestKey], damaged: set[RequestKey]) -> None:
    keys = list(line.lives)
    match event:
        case ("add", str() as script, int() as max_tokens):
            line.add(script, max_tokens)
        case ("step",):
            line.step()
        case ("move", int() as place, int() as luck) if place < len(keys):
            life = line.lives[keys[place]]
            damage = luck == 0 and bool(life.chunks) and not life.is_gone and not life.has_joined
            if damage:
                damaged.add(keys[place])
            line.move(keys[place], damage=damage)
        case ("grant", int() as place, int() as more) if place < len(keys):
            line.grant(keys[place], more)
        case ("cancel", int() as place) if place < len(keys):
            line.cancel(keys[place])
            cancelled.add(keys[place])
        case _:
            return


@settings(max_examples=50, deadline=None)
@given(first=st.lists(ADDS, min_size=2, max_size=5), events=EVENTS)
def test_every_answer_is_exact_and_every_block_comes_back(
    first: list[tuple[object, ...]], events: list[tuple[object, ...]]
) -> None:
    """Whatever the order: tokens are the script's, ends are right, damage is found at commit, nothing leaks."""
    line = _Line()
    cancelled: set[RequestKey] = set()
    damaged: set[RequestKey] = set()
    for event in first + events:
        _happen(line, event, cancelled, damaged)
    for _ in range(100):  # then everyone gets what he waits for
        for key in line.lives:
            line.move(key, damage=False)
            line.grant(key, 5)
        line.step()

    for key, life in line.lives.items():
        script = Script.from_prompt(life.spec.prompt_ids)
        assert [script.token_id(index) for index in range(1, len(life.tokens) + 1)] == life.tokens
        assert life.is_gone
        if key in cancelled:
            continue
        end = min(script.num_scripted_tokens + 1 if script.eos else life.spec.max_tokens, life.spec.max_tokens)
        if script.fail_at is not None and script.fail_at <= end and key not in damaged:
            assert (ErrorCode.INTERNAL, script.fail_at - 1) == (life.fault, len(life.tokens))
        elif key in damaged and end > 1 and script.fail_at != 1:
            assert (ErrorCode.KV_CORRUPT, 1) == (life.fault, len(life.tokens))
        elif key not in damaged:
            is_stop = script.eos and script.num_scripted_tokens < life.spec.max_tokens
            expected = FinishReason.STOP if is_stop else FinishReason.LENGTH
            assert (None, expected, end) == (life.fault, life.finish, len(life.tokens))
    assert [NUM_BLOCKS] * 2 == [pool.num_available for pool in line.pools]
    assert len(line.prefixes) == line.pools[0].counts()[BlockState.CACHED]
    assert not line.prefill.has_work
    assert not line.decode.has_work
