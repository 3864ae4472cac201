"""Tests of `shared.engine.build`."""

import subprocess
import sys

import pytest

from shared.engine.build import Engine, build_engine
from shared.engine.scripted import ScriptedExecutor


class _Clock:
    def monotonic(self) -> float:
        return 0.0

    def unix_ms(self) -> int:
        return 0


def _build(*, block_size: int = 16, kv_pool_mib: int = 1, chunk_tokens: int = 64) -> Engine:
    return build_engine(
        model_dir=None,
        block_size=block_size,
        kv_pool_mib=kv_pool_mib,
        chunk_tokens=chunk_tokens,
        num_threads=None,
        clock=_Clock(),
    )


def test_the_pool_holds_what_fits() -> None:
    """1 MiB at 64 bytes a token and 16 tokens a block: 1,024 blocks, shared by executor and memory."""
    engine = _build()

    assert isinstance(engine.executor, ScriptedExecutor)
    assert (1024, engine.memory.layout) == (engine.memory.num_blocks, engine.executor.layout)


@pytest.mark.parametrize("chunk_tokens", [0, 8, 24])
def test_chunks_must_end_at_blocks(chunk_tokens: int) -> None:
    """A frame starts at a block, so a chunk must end at one."""
    with pytest.raises(ValueError, match="multiple of the block size"):
        _build(chunk_tokens=chunk_tokens)


def test_a_pool_without_a_block_is_refused() -> None:
    """Better at the start than at the first request."""
    with pytest.raises(ValueError, match="holds no block"):
        _build(kv_pool_mib=0)


def test_a_scripted_engine_loads_no_torch() -> None:
    """In a fresh interpreter: scripted workers start in a fraction of a second."""
    code = "import sys; import shared.engine.build, shared.engine.step_loop; sys.exit('torch' in sys.modules)"

    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode
