"""Tests of `shared.engine.build`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from shared.domain.request import Role
from shared.engine.build import Engine, build_engine
from shared.engine.model_executor import ModelExecutor
from shared.engine.scripted import ScriptedExecutor
from shared.kv.layout import KvLayout
from shared.model.numerics import NumericMode
from shared.model.prepare import prepare, prepare_mode
from shared.model.prepared import PreparationError, PreparedModel
from shared.settings import WorkerSettings
from tests.support.tiny_models import EOS_ID, TinyModel, write_gguf

pytestmark = pytest.mark.timeout(300)  # the first run on a machine compiles the kernels


class _Clock:
    def monotonic(self) -> float:
        return 0.0

    def unix_ms(self) -> int:
        return 0


def _build(role: Role = Role.PREFILL, chunk_tokens: int = 64, **settings: Any) -> Engine:
    config = WorkerSettings.model_validate({"kv_pool_mib": 1, "num_threads": 1, **settings})
    return build_engine(config, role, chunk_tokens=chunk_tokens, clock=_Clock())


def test_the_pool_holds_what_fits() -> None:
    """1 MiB at 64 bytes a token and 16 tokens a block: 1,024 blocks, shared by executor and memory."""
    engine = _build(scripted=True)

    assert isinstance(engine.executor, ScriptedExecutor)
    assert (1024, engine.memory.layout) == (engine.memory.num_blocks, engine.executor.layout)
    assert "KV pool: 16384 tokens" == engine.pool_note


@pytest.mark.parametrize("chunk_tokens", [0, 8, 24])
def test_chunks_must_end_at_blocks(chunk_tokens: int) -> None:
    """A frame starts at a block, so a chunk must end at one."""
    with pytest.raises(ValueError, match="multiple of the block size"):
        _build(scripted=True, chunk_tokens=chunk_tokens)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with 4-bit weights, prepared for its default mode and for float32."""
    home = tmp_path_factory.mktemp("home")
    q4 = GGMLQuantizationType.Q4_1
    folder = prepare(
        write_gguf(TinyModel(num_kv_heads=4).build(), home / "tiny.gguf", matrix_type=q4), home, lambda _: None
    )
    for mode in (NumericMode.Q4A16, NumericMode.F32):
        prepare_mode(PreparedModel.load(folder), mode, home, lambda _: None)
    return folder


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_prepared_folder_gives_the_model(model_dir: Path, backend: str) -> None:
    """Window and end tokens are those of preparation; the pool is cut to the model's layout and the KV type."""
    engine = _build(model_dir=model_dir, backend=backend, kv_dtype="float16")
    executor = engine.executor

    assert isinstance(executor, ModelExecutor)
    assert (256, {EOS_ID}) == (executor.window, executor.eos_ids)
    assert (1 << 20) // (2 * 2 * 4 * 64 * 2 * 16) == engine.memory.num_blocks
    assert engine.has_same_numerics


def test_a_pool_without_a_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better at the start than at the first request: a machine that is full leaves a share of less than a block."""
    shares = {0: 1023}
    monkeypatch.setattr("shared.engine.build.pool_bytes", shares.__getitem__)
    with pytest.raises(ValueError, match="1023 bytes holds no block of 1024 bytes"):
        _build(scripted=True, kv_pool_mib=0)


def _layouts(**settings: Any) -> tuple[KvLayout, KvLayout, bool]:
    """Of both roles of one deployment, and whether they compute the same bits."""
    prefill, decode = (_build(role, backend="torch", **settings) for role in (Role.PREFILL, Role.DECODE))
    assert prefill.has_same_numerics == decode.has_same_numerics
    return prefill.memory.layout, decode.memory.layout, decode.has_same_numerics


def test_roles_may_differ_on_purpose_and_only_so(model_dir: Path) -> None:
    """Pairs of one deployment agree on the layout whatever their modes; another deployment's do not agree with them."""
    same = _layouts(model_dir=model_dir)
    named = _layouts(model_dir=model_dir, numeric_mode="q4a16")
    float32 = _layouts(model_dir=model_dir, numeric_mode="f32")
    mixed = _layouts(model_dir=model_dir, numeric_mode="f32", decode_numeric_mode="q4a16")
    swapped = _layouts(model_dir=model_dir, prefill_numeric_mode="q4a16", decode_numeric_mode="f32")

    for prefill, decode, _ in (same, named, float32, mixed, swapped):
        assert prefill.fingerprint == decode.fingerprint
    assert same == named
    assert [True, True, False, False] == [each[2] for each in (same, float32, mixed, swapped)]
    assert 4 == len({each[0].fingerprint for each in (same, float32, mixed, swapped)})


def test_backends_are_unlike(model_dir: Path) -> None:
    """Their bits differ, so a pair of the two is refused at the handshake."""
    cpu, torch = (_build(model_dir=model_dir, backend=backend) for backend in ("cpu", "torch"))

    assert cpu.memory.layout.fingerprint != torch.memory.layout.fingerprint


@pytest.mark.parametrize(
    ("settings", "unwanted"),
    [
        ({"scripted": True}, ["torch", "numba", "transformers"]),
        ({"backend": "cpu"}, ["torch", "transformers", "gguf"]),
        ({"backend": "torch"}, ["numba", "transformers", "gguf"]),
    ],
)
def test_a_worker_loads_only_what_it_computes_with(
    settings: dict[str, Any], unwanted: list[str], model_dir: Path
) -> None:
    """In a fresh interpreter: each of these packages costs a worker seconds and hundreds of megabytes."""
    chosen = settings if "scripted" in settings else settings | {"model_dir": str(model_dir)}
    code = f"""
import sys
from shared.domain.request import Role
from shared.engine.build import build_engine
from shared.engine import step_loop
from shared.settings import WorkerSettings
build_engine(WorkerSettings.model_validate({chosen!r}), Role.DECODE, chunk_tokens=16, clock=None)
print([name for name in {unwanted!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)

    assert (0, "[]\n") == (done.returncode, done.stdout), done.stderr


def test_folders_that_cannot_be_used_are_refused(model_dir: Path, tmp_path: Path) -> None:
    """With one sentence of preparation, for the person who set the folder, the mode or the device."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model_dir": tmp_path}, "not a prepared model folder"),
        ({"model_dir": model_dir, "numeric_mode": "q8a16"}, "not prepared for mode q8a16"),
        ({"model_dir": model_dir, "numeric_mode": "bf16"}, "torch backend only"),
        ({"model_dir": model_dir, "backend": "torch", "device": "nowhere"}, "no device 'nowhere'"),
    ]
    for settings, part in cases:
        with pytest.raises(PreparationError, match=part):
            _build(**settings)
