"""Prefill and decode of a model side by side in one process, without threads: the real runners, pools, prefix indexes and
frames, through which a crowd of requests goes in any order.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from shared.domain.ids import Attempt, RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.engine.decode_runner import DecodeRunner, DecodeSequence, DecodeStep, Join, Leave
from shared.engine.model_executor import ModelExecutor
from shared.engine.prefill_runner import AddPrompt, PrefillRunner, PrefillStep
from shared.kv.block_pool import BlockPool
from shared.kv.block_table import BlockTable
from shared.kv.frame_plan import plan_frames
from shared.kv.memory import KvMemory
from shared.kv.prefix_cache import PrefixCache
from shared.model.model import Model
from shared.model.prepared import PreparedModel

BLOCK_SIZE, CHUNK, BUDGET = 16, 32, 96


@dataclass
class _Life:
    """One request: where it is, and its answer so far."""

    key: RequestKey
    spec: RequestSpec
    outputs: list[TokenId] = field(default_factory=list[TokenId])
    source: BlockTable | None = None
    target: BlockTable | None = None
    num_held: int = 0
    """Prompt tokens whose KV decode had already."""


class _Side:
    """Cache, pool and prefix index of one role."""

    def __init__(self, model: Model, prepared: PreparedModel, kv_dtype: str, num_blocks: int) -> None:
        self.memory = KvMemory(model.layout(BLOCK_SIZE, kv_dtype), num_blocks)
        self.pool = BlockPool(num_blocks)
        self.prefixes = PrefixCache(self.pool, BLOCK_SIZE)
        self.executor = ModelExecutor(
            model, self.memory, window=prepared.window, eos_ids=prepared.eos_ids, chunk_tokens=CHUNK
        )

    def take(self, spec: RequestSpec, *, max_cached: int, num_tokens: int) -> tuple[BlockTable, int] | None:
        """Blocks for so many tokens, and how many of the prompt's tokens they hold already; None where too few are left."""
        cached = self.prefixes.match(spec.prompt_ids, salt=spec.kv_salt, max_tokens=max_cached)
        num_new = self.memory.layout.num_blocks_for(num_tokens) - len(cached)
        new = self.pool.reserve(num_new) if num_new else ()
        if new is None:
            self.pool.free(cached)
            return None
        self.pool.activate(new)
        return BlockTable((*cached, *new), BLOCK_SIZE), len(cached) * BLOCK_SIZE


class ModelLine:
    """`answers` may be asked for more than once: what the prefix indexes hold stays. Pools are checked after every step."""

    def __init__(self, model: Model, prepared: PreparedModel, *, kv_dtype: str, num_blocks: int) -> None:
        self._prefill, self._decode = (_Side(model, prepared, kv_dtype, num_blocks) for _ in range(2))
        self._prompts = PrefillRunner(self._prefill.executor, token_budget=BUDGET, max_sequences=8)
        self._rows = DecodeRunner(self._decode.executor)
        self._lives: dict[RequestKey, _Life] = {}
        self._waiting: deque[_Life] = deque()
        self.num_cached = 0
        """Prompt tokens that prefill did not compute."""
        self.num_held = 0
        """Prompt tokens that were not sent, because decode had them."""
        self.num_replayed = 0
        self.batch_sizes: set[int] = set()
        """Sequences that got a token in one step of decode."""

    def answers(self, specs: Sequence[RequestSpec], *, at_once: int, seed: int, leaves: float) -> list[tuple[int, ...]]:
        """All answers in the order of `specs`, so many under way at any time, in an order by `seed`.

        After each step one that is in the batch leaves it with this probability, and comes back with what it has.
        """
        random = Random(seed)
        lives = [_Life(key=RequestKey(spec.request_id, Attempt(1)), spec=spec) for spec in specs]
        self._waiting.extend(random.sample(lives, len(lives)))
        while self._waiting or self._lives:
            while self._waiting and len(self._lives) < at_once and self._admit(self._waiting[0]):
                self._waiting.popleft()
            for report in (self._prompts.acknowledge(), self._prompts.step()):
                if report is not None:
                    self._take_prefill(report)
            running = [life for life in self._lives.values() if life.source is None]
            if running and random.random() < leaves:
                self._rows.apply(Leave(key=random.choice(running).key))
            for report in (self._rows.acknowledge(), self._rows.step()):
                if report is not None:
                    self._take_decode(report)
            self._prefill.prefixes.check_integrity()
            self._decode.prefixes.check_integrity()
        for side in (self._prefill, self._decode):
            assert side.pool.num_available == side.pool.num_blocks
        return [tuple(life.outputs) for life in lives]

    def _admit(self, life: _Life) -> bool:
        spec = life.spec
        at_decode = self._decode.take(spec, max_cached=spec.num_prompt_tokens, num_tokens=spec.max_total_tokens)
        if at_decode is None:
            return False
        at_prefill = self._prefill.take(spec, max_cached=spec.num_prompt_tokens - 1, num_tokens=spec.num_prompt_tokens)
        if at_prefill is None:
            self._decode.pool.free(at_decode[0].block_ids)
            return False
        life.target, life.num_held = at_decode
        life.source, start = at_prefill
        self.num_held += life.num_held
        self.num_cached += start
        self._lives[life.key] = life
        self._prompts.apply(
            AddPrompt(key=life.key, spec=spec, block_table=life.source, start=start, wants_token=not life.outputs)
        )
        return True

    def _take_prefill(self, report: PrefillStep) -> None:
        assert not report.faults
        for chunk in report.chunks:
            life = self._lives[chunk.key]
            assert life.source is not None
            self._prefill.prefixes.insert(
                life.spec.prompt_ids[: chunk.end], salt=life.spec.kv_salt, block_ids=life.source.block_ids
            )
        for key, sampled in report.first_tokens.items():
            self._lives[key].outputs.append(sampled.token_id)
        for chunk in report.chunks:
            if chunk.is_last:
                self._hand_over(self._lives[chunk.key])

    def _hand_over(self, life: _Life) -> None:
        """What decode lacks of the prompt, in frames; then the sequence joins, or is done with token 1."""
        source, target, spec = life.source, life.target, life.spec
        assert source is not None
        assert target is not None
        for frame in plan_frames(self._prefill.memory.layout, life.num_held, spec.num_prompt_tokens):
            layers = {"layer_start": frame.layer_start, "layer_end": frame.layer_end}
            payload = self._prefill.memory.read(
                source.blocks_of(frame.token_start, frame.token_end),
                num_tokens=frame.token_end - frame.token_start,
                **layers,
            )
            self._decode.memory.write(
                target.blocks_of(frame.token_start, frame.token_end), payload=bytes(payload), **layers
            )
        self._prefill.pool.free(source.block_ids)
        life.source = None
        if spec.max_tokens == 1:
            self._let_go(life)
            return
        self._decode.prefixes.insert(spec.prompt_ids, salt=spec.kv_salt, block_ids=target.block_ids)
        self._rows.apply(
            Join(
                sequence=DecodeSequence(
                    key=life.key,
                    spec=spec,
                    block_table=target,
                    outputs=tuple(life.outputs),
                    may_compute_upto=spec.max_tokens,
                )
            )
        )

    def _take_decode(self, report: DecodeStep) -> None:
        assert not report.faults
        self.num_replayed += report.num_replayed
        if report.tokens:
            self.batch_sizes.add(len(report.tokens))
        for token in report.tokens:
            life = self._lives[token.key]
            life.outputs.append(token.sampled.token_id)
            if token.finish is not None and life.target is not None:
                # Both roles have the same numerics: a prompt that goes on from here may find the answer's blocks.
                computed = (*life.spec.prompt_ids, *life.outputs[:-1])
                self._decode.prefixes.insert(computed, salt=life.spec.kv_salt, block_ids=life.target.block_ids)
                self._let_go(life)
        for key in report.left:
            if (life := self._lives.get(key)) is not None:
                self._let_go(life)
                self._waiting.append(life)

    def _let_go(self, life: _Life) -> None:
        assert life.target is not None
        self._decode.pool.free(life.target.block_ids)
        life.target = None
        del self._lives[life.key]
