"""An executor and its cache from a worker's settings. Loads torch only for the torch backend."""

import os
from dataclasses import dataclass, replace

from shared.domain.clock import Clock
from shared.domain.request import Role
from shared.engine.executor import Executor
from shared.engine.kv_digest import digest_layout
from shared.engine.model_executor import ModelExecutor
from shared.engine.pool_size import pool_bytes
from shared.engine.scripted import ScriptedExecutor
from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory
from shared.model.model import Model
from shared.model.numerics import NumericMode, deployment_numerics
from shared.model.prepared import PreparedModel
from shared.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What a worker computes with. `executor` works on `memory` from the engine thread; frames are copied by others."""

    executor: Executor
    memory: KvMemory
    has_same_numerics: bool = True
    """Whether prefill and decode of this deployment compute the same bits."""
    step_tokens: int | None = None
    """Prompt tokens beyond which a step only gets longer, not cheaper a token; None where all that fit gain."""

    @property
    def pool_note(self) -> str:
        """The size of the KV pool, for a person."""
        return f"KV pool: {self.memory.num_blocks * self.memory.layout.block_size} tokens"


def build_engine(config: WorkerSettings, role: Role, *, chunk_tokens: int, clock: Clock) -> Engine:
    """The model in the prepared folder of the settings (takes seconds), or the scripted generator.

    `chunk_tokens` is the longest prefill chunk, a multiple of the block size; decode does not use it. Raises ValueError
    for a pool that holds no block or a chunk that ends inside one, and PreparationError, one sentence, for a folder
    that is not usable or not prepared for the mode.
    """
    block_size = config.block_size
    if chunk_tokens < 1 or chunk_tokens % block_size:
        raise ValueError(f"a prefill chunk of {chunk_tokens} tokens is not a multiple of the block size {block_size}")
    if config.model_dir is None:
        memory = _memory(digest_layout(block_size), config.kv_pool_mib)
        return Engine(executor=ScriptedExecutor(memory, chunk_tokens=chunk_tokens, clock=clock), memory=memory)
    prepared = PreparedModel.load(config.model_dir)
    modes = {each: _mode(config, each, prepared) for each in (Role.PREFILL, Role.DECODE)}
    model = _load(config, prepared, modes[role])
    numerics = {each: _numerics(config, mode) for each, mode in modes.items()}
    # Both roles know both modes: pairs that differ on purpose agree on the layout, and others do not.
    layout = replace(
        model.layout(block_size, config.kv_dtype),
        numerics=deployment_numerics(
            prepared.source_hash, prefill=numerics[Role.PREFILL], decode=numerics[Role.DECODE]
        ),
    )
    memory = _memory(layout, config.kv_pool_mib)
    executor = ModelExecutor(model, memory, window=prepared.window, eos_ids=prepared.eos_ids, chunk_tokens=chunk_tokens)
    return Engine(
        executor=executor,
        memory=memory,
        has_same_numerics=numerics[Role.PREFILL] == numerics[Role.DECODE],
        # Measured on two cores: 32, 64, 128 and 256 rows take the same time a row.
        step_tokens=chunk_tokens if config.backend == "cpu" else None,
    )


def _mode(config: WorkerSettings, role: Role, prepared: PreparedModel) -> NumericMode:
    """The role's own mode, else the deployment's, else the model's."""
    of_role = config.prefill_numeric_mode if role is Role.PREFILL else config.decode_numeric_mode
    return NumericMode(of_role or config.numeric_mode or prepared.default_mode)


# The backends are imported where they are chosen: a worker loads torch or numba, never both.


def _load(config: WorkerSettings, prepared: PreparedModel, mode: NumericMode) -> Model:
    match config.backend:
        case "cpu":
            from shared.model.kernels.cpu.model import CpuModel

            return CpuModel.load(prepared, mode, config.num_threads or _num_cores())
        case "torch":
            from shared.model.torch_model import TorchModel

            return TorchModel.load(prepared, mode, device=config.device, num_threads=config.num_threads)


def _numerics(config: WorkerSettings, mode: NumericMode) -> str:
    match config.backend:
        case "cpu":
            from shared.model.kernels.cpu.model import cpu_numerics

            return cpu_numerics(mode)
        case "torch":
            from shared.model.torch_model import torch_device, torch_numerics

            return torch_numerics(mode, torch_device(config.device))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory(layout: KvLayout, kv_pool_mib: int) -> KvMemory:
    num_bytes = pool_bytes(kv_pool_mib)
    num_blocks = num_bytes // layout.block_bytes
    if num_blocks < 1:
        raise ValueError(f"a KV pool of {num_bytes} bytes holds no block of {layout.block_bytes} bytes")
    return KvMemory(layout, num_blocks)
