"""The engine beside what this machine can do: `python tests/bench/engine.py [--numeric-mode M] [--threads 1,2]`.

First it measures the machine: how fast one and all threads read memory, and how many multiplications a second numpy's
own float32 product reaches. Then the steps of the default model, each as the least of some repeats, with the ratio to
the limit that binds it: a decode step cannot be shorter than reading the weights and the context takes, a prefill not
shorter than its multiplications take. Last, what a step and a request may not depend on: the size of the pool, blocks
in the cache, history.
"""

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.domain.ids import BlockId, TokenId
from shared.kv.block_pool import BlockPool
from shared.kv.memory import KvMemory
from shared.kv.prefix_cache import PrefixCache
from shared.model.kernels.cpu.model import CpuModel
from shared.model.model import Segment
from shared.model.numerics import NumericMode
from shared.model.prepare import prepare, prepare_mode
from shared.model.prepared import PreparedModel
from tests.bench.step_cost import report_step_cost

BLOCK_SIZE = 16
CHUNK_TOKENS = 64
BATCHES = (1, 4, 8, 16)
CONTEXTS = (256, 1000)
PROMPTS = (128, 512, 1024)
REPEATS = 9
POOL_TOKENS = 20_000
READ_MIB = 256  # far beyond every cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this machine reaches, by number of threads."""

    read_bytes_s: dict[int, float]
    multiply_adds_s: dict[int, float]


def least_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The shortest of some runs: what the machine does when nobody disturbs it."""
    times: list[float] = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def measure_limits(thread_counts: Iterable[int]) -> Limits:
    """Reads 256 MiB, and multiplies matrices that fit a cache, in each number of threads."""
    read: dict[int, float] = {}
    multiply: dict[int, float] = {}
    data = np.ones(READ_MIB << 18, dtype=np.float32)
    side = 512
    left = np.ones((side, side), dtype=np.float32)
    for threads in thread_counts:
        parts = np.array_split(data, threads)
        read[threads] = data.nbytes / least_s(lambda parts=parts: _side_by_side([part.max for part in parts]))
        products = [lambda: left @ left] * threads
        multiply[threads] = threads * side**3 / least_s(lambda products=products: _side_by_side(products), 30)
    return Limits(read_bytes_s=read, multiply_adds_s=multiply)


def _side_by_side(works: Sequence[Callable[[], object]]) -> None:
    helpers = [threading.Thread(target=work) for work in works[1:]]
    for helper in helpers:
        helper.start()
    works[0]()
    for helper in helpers:
        helper.join()


class Subject:
    """A model with a cache in which every sequence has blocks of its own."""

    def __init__(
        self, prepared: PreparedModel, mode: NumericMode, threads: int, pool_tokens: int = POOL_TOKENS
    ) -> None:
        self.model = CpuModel.load(prepared, mode, threads)
        self.memory = KvMemory(self.model.layout(BLOCK_SIZE, "float32"), pool_tokens // BLOCK_SIZE)
        self.weight_bytes = prepared.packed_path(mode.weight_format).stat().st_size

    def table(self, place: int, num_tokens: int) -> npt.NDArray[np.int64]:
        """Blocks of the `place`-th sequence of this length."""
        num_blocks = self.memory.layout.num_blocks_for(num_tokens + 1)
        return np.arange(place * num_blocks, (place + 1) * num_blocks)

    def decode_s(self, batch: int, context: int) -> float:
        """One step of `batch` sequences that each have `context` tokens behind them."""
        segments = [
            Segment(token_ids=(7,), start=context, block_table=self.table(place, context), want_logits=True)
            for place in range(batch)
        ]
        return least_s(lambda: self.model.forward(self.memory, segments))

    def prefill_s(self, num_tokens: int) -> float:
        """A whole prompt in chunks."""
        table = self.table(0, num_tokens)

        def whole() -> None:
            for start in range(0, num_tokens, CHUNK_TOKENS):
                end = min(start + CHUNK_TOKENS, num_tokens)
                last = end == num_tokens
                segment = Segment(token_ids=(7,) * (end - start), start=start, block_table=table, want_logits=last)
                self.model.forward(self.memory, [segment])

        return least_s(whole, 3)

    def token_multiply_adds(self, mean_context: float) -> float:
        """Of one token in the layers: products, and attention over its context."""
        config = self.model.config
        heads = config.num_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim
        products = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
        return config.num_layers * (products + 2 * mean_context * heads)


def report_steps(subject: Subject, threads: int, limits: Limits) -> None:
    """Decode steps and prefills of one number of threads."""
    for context in CONTEXTS:
        for batch in BATCHES:
            took_s = subject.decode_s(batch, context)
            moved = subject.weight_bytes + batch * context * subject.memory.layout.token_bytes
            floor_s = moved / limits.read_bytes_s[threads]
            print(
                f"decode   {threads} threads  context {context:5d}  batch {batch:3d}  {took_s * 1e3:7.2f} ms  "
                f"{batch / took_s:7.1f} tok/s  {moved / 1e6:6.0f} MB  {took_s / floor_s:5.2f} x the time to read that"
            )
    for num_tokens in PROMPTS:
        took_s = subject.prefill_s(num_tokens)
        work = num_tokens * subject.token_multiply_adds(num_tokens / 2)
        floor_s = work / limits.multiply_adds_s[threads]
        print(
            f"prefill  {threads} threads  {num_tokens:5d} tokens  {took_s * 1e3:8.1f} ms  {num_tokens / took_s:7.1f} tok/s  "
            f"{took_s / floor_s:5.2f} x the time of its multiplications in numpy's float32 product"
        )


def report_constancy(prepared: PreparedModel, mode: NumericMode) -> None:
    """Costs that must stay where they are; each as a ratio of the large case to the small one."""
    small = Subject(prepared, mode, 1, pool_tokens=2_000)
    large = Subject(prepared, mode, 1, pool_tokens=40_000)
    pairs = [(small.decode_s(4, 256), large.decode_s(4, 256)) for _ in range(3)]
    ratio = min(pair[1] for pair in pairs) / min(pair[0] for pair in pairs)
    print(f"step with a pool of 40,000 tokens to one with 2,000: {ratio:.2f} x")
    one, many = (_request_s(num_cached) for num_cached in (100, 10_000))
    print(f"a request's blocks (match, reserve, insert, free) beside 10,000 cached blocks to 100: {many / one:.2f} x")


def _request_s(num_cached: int) -> float:
    """Pool and prefix cache work of a request of 20 blocks, in a pool whose every block is cached."""
    pool = BlockPool(num_cached)
    cache = PrefixCache(pool, BLOCK_SIZE)
    number = 0

    def request() -> None:
        nonlocal number
        number += 1
        tokens = tuple(TokenId(number * 1000 + place) for place in range(20 * BLOCK_SIZE))
        held: tuple[BlockId, ...] = cache.match(tokens, salt=0, max_tokens=len(tokens))
        fresh = pool.reserve(20 - len(held))
        assert fresh is not None
        pool.activate(fresh)
        cache.insert(tokens, salt=0, block_ids=(*held, *fresh))
        pool.free((*held, *fresh))

    for _ in range(num_cached // 20 + 1):
        request()
    return least_s(request, 200)


def main() -> None:
    """Prints a line a figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numeric-mode", type=NumericMode, default=NumericMode.Q4A16, choices=list(NumericMode))
    parser.add_argument("--threads", default=f"1,{os.cpu_count() or 1}")
    parser.add_argument("--home", type=Path, default=Path.home() / ".firsttoken")
    options = parser.parse_args()
    mode: NumericMode = options.numeric_mode
    thread_counts = sorted({int(count) for count in options.threads.split(",")})
    prepared = PreparedModel.load(prepare(None, options.home, print))
    prepare_mode(prepared, mode, options.home, print)
    limits = measure_limits(thread_counts)
    for threads in thread_counts:
        print(
            f"limits   {threads} threads  reading {limits.read_bytes_s[threads] / 1e9:.1f} GB/s  "
            f"{limits.multiply_adds_s[threads] / 1e9:.1f} G multiply-adds/s"
        )
    for threads in thread_counts:
        report_steps(Subject(prepared, mode, threads), threads, limits)
    report_constancy(prepared, mode)
    report_step_cost()


if __name__ == "__main__":
    main()
