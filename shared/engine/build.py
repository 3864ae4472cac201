"""An executor and its cache from a worker's settings. Loads torch only when a model is asked for."""

from dataclasses import dataclass
from pathlib import Path

from shared.domain.clock import Clock
from shared.engine.executor import Executor
from shared.engine.kv_digest import digest_layout
from shared.engine.scripted import ScriptedExecutor
from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory
from shared.model.prepared import PreparedModel

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What a worker computes with. `executor` works on `memory` from the engine thread; frames are copied by others."""

    executor: Executor
    memory: KvMemory
    has_same_numerics: bool = True
    """Whether prefill and decode of this deployment compute the same bits."""


def build_engine(
    *,
    model_dir: Path | None,
    block_size: int,
    kv_pool_mib: int,
    chunk_tokens: int,
    num_threads: int | None,
    clock: Clock,
) -> Engine:
    """The model in the prepared folder `model_dir` (takes seconds), or the scripted generator when that is None.

    `chunk_tokens` is the longest prefill chunk, a multiple of the block size; decode does not use it. `num_threads`
    None means all cores. Raises ValueError for a pool that holds no block or a chunk that ends inside one, and
    PreparationError for a folder that is not usable.
    """
    if chunk_tokens < 1 or chunk_tokens % block_size:
        raise ValueError(f"a prefill chunk of {chunk_tokens} tokens is not a multiple of the block size {block_size}")
    if model_dir is None:
        memory = _memory(digest_layout(block_size), kv_pool_mib)
        return Engine(executor=ScriptedExecutor(memory, chunk_tokens=chunk_tokens, clock=clock), memory=memory)
    # Here and not above, so that a scripted worker starts without torch.
    from shared.engine.torch_executor import TorchExecutor
    from shared.model.llama import LlamaModel

    prepared = PreparedModel.load(model_dir)
    model = LlamaModel.load(model_dir, num_threads)
    memory = _memory(model.layout(block_size), kv_pool_mib)
    executor = TorchExecutor(model, memory, window=prepared.window, eos_ids=prepared.eos_ids, chunk_tokens=chunk_tokens)
    return Engine(executor=executor, memory=memory)


def _memory(layout: KvLayout, kv_pool_mib: int) -> KvMemory:
    num_blocks = kv_pool_mib * _MIB // layout.block_bytes
    if num_blocks < 1:
        raise ValueError(f"a KV pool of {kv_pool_mib} MiB holds no block of {layout.block_bytes} bytes")
    return KvMemory(layout, num_blocks)
