from pathlib import Path

import pytest
from pydantic import ValidationError

from shared.settings import ModelSettings, ServiceSettings, SettingsError, WorkerSettings, describe, load


def test_defaults_need_no_environment() -> None:
    """Loopback and no secrets unless told otherwise; foreign and unknown variables mean nothing."""
    config = load(ServiceSettings, {"PORT": "1", "FIRSTTOKEN_UNKNOWN": "x", "FIRSTTOKEN_LOG_LEVEL": ""})

    assert ("127.0.0.1", 0, "INFO", None) == (config.host, config.port, config.log_level, config.scheduler)


def test_values_are_typed(tmp_path: Path) -> None:
    """Each variable becomes its type."""
    config = load(
        WorkerSettings,
        {
            "FIRSTTOKEN_PORT": "7100",
            "FIRSTTOKEN_MODEL_DIR": str(tmp_path),
            "FIRSTTOKEN_CLUSTER_TOKEN": "secret",
            "FIRSTTOKEN_SCHEDULER": "[::1]:7000",
            "FIRSTTOKEN_WORKER_ID": "decode-0",
        },
    )

    assert (7100, 8100, tmp_path) == (config.port, config.chosen_admin_port, config.model_dir)
    assert ("secret", "[::1]:7000", "decode-0") == (
        config.cluster_token.get_secret_value(),
        config.scheduler,
        config.worker_id,
    )


def test_all_mistakes_in_one_report() -> None:
    """A person corrects the settings once, not one by one."""
    with pytest.raises(SettingsError) as caught:
        load(
            WorkerSettings,
            {
                "FIRSTTOKEN_PORT": "http",
                "FIRSTTOKEN_SCHEDULER": "nowhere",
                "FIRSTTOKEN_REDIS_URL": "localhost:6379",
                "FIRSTTOKEN_KV_POOL_MIB": "-1",
                "FIRSTTOKEN_MODEL_DIR": "/does/not/exist",
            },
        )

    names = [problem.partition(":")[0] for problem in caught.value.problems]
    assert sorted(names) == [
        "FIRSTTOKEN_KV_POOL_MIB",
        "FIRSTTOKEN_MODEL_DIR",
        "FIRSTTOKEN_PORT",
        "FIRSTTOKEN_REDIS_URL",
        "FIRSTTOKEN_SCHEDULER",
    ]


@pytest.mark.parametrize("both", [True, False])
def test_exactly_one_model(both: bool, tmp_path: Path) -> None:
    """Neither and both are mistakes, told with the names of both variables."""
    environ = {"FIRSTTOKEN_MODEL_DIR": str(tmp_path), "FIRSTTOKEN_SCRIPTED": "true"} if both else {}
    with pytest.raises(SettingsError, match="exactly one of FIRSTTOKEN_MODEL_DIR and FIRSTTOKEN_SCRIPTED"):
        load(ModelSettings, environ)


def test_served_name_follows_the_model(tmp_path: Path) -> None:
    """A given name wins, a scripted deployment says that it is one."""
    assert "scripted" == load(ModelSettings, {"FIRSTTOKEN_SCRIPTED": "1"}).served_model_name
    model = {"FIRSTTOKEN_MODEL_DIR": str(tmp_path)}
    assert "SmolLM2-135M-Instruct" == load(ModelSettings, model).served_model_name
    assert "mine" == load(ModelSettings, {**model, "FIRSTTOKEN_SERVED_MODEL_NAME": "mine"}).served_model_name


def test_admin_port_follows_the_port() -> None:
    """Port + 1000; the kernel's choice where the port is the kernel's choice; or what was asked for."""
    ports = [(0, None), (7000, None), (7000, 0), (0, 9)]
    configs = [ServiceSettings(port=port, admin_port=admin) for port, admin in ports]

    assert [0, 8000, 0, 9] == [config.chosen_admin_port for config in configs]


def test_frozen_and_free_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings made in a test depend on nothing around it, and do not change."""
    monkeypatch.setenv("FIRSTTOKEN_PORT", "1234")
    config = ServiceSettings()

    assert 0 == config.port
    with pytest.raises(ValidationError):
        config.port = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_description_hides_secrets() -> None:
    """What is logged at the start shows neither the cluster token nor a password in the URL."""
    text = str(
        describe(
            load(
                ServiceSettings,
                {
                    "FIRSTTOKEN_CLUSTER_TOKEN": "hush-token",
                    "FIRSTTOKEN_REDIS_URL": "redis://user:hush-password@store:6380/2",
                },
            )
        )
    )

    assert "hush" not in text
    assert "store:6380/2" in text


def test_transports_are_an_ordered_choice() -> None:
    """Best first, blanks between them do not matter; what does not exist, is named twice or leaves none is told."""
    chosen = [
        load(WorkerSettings, {"FIRSTTOKEN_SCRIPTED": "true", "FIRSTTOKEN_TRANSPORTS": listed}).kv_transports
        for listed in ("", "grpc", "grpc, shm")
    ]
    assert [("shm", "grpc"), ("grpc",), ("grpc", "shm")] == chosen
    for listed in ("tcp", "shm,shm", ","):
        with pytest.raises(SettingsError, match=r"FIRSTTOKEN_TRANSPORTS: .* must be some of shm, grpc"):
            load(WorkerSettings, {"FIRSTTOKEN_SCRIPTED": "true", "FIRSTTOKEN_TRANSPORTS": listed})


def test_how_a_worker_computes() -> None:
    """The cpu backend, the model's own mode and float32 KV, unless told otherwise; names are checked."""
    default = load(WorkerSettings, {"FIRSTTOKEN_SCRIPTED": "1"})
    environ = {"FIRSTTOKEN_SCRIPTED": "1", "FIRSTTOKEN_NUMERIC_MODE": "q4a8", "FIRSTTOKEN_KV_DTYPE": "float16"}
    chosen = load(WorkerSettings, environ | {"FIRSTTOKEN_BACKEND": "torch", "FIRSTTOKEN_DEVICE": "cuda"})

    assert ("cpu", None, None, None, "float32") == (
        default.backend,
        default.numeric_mode,
        default.prefill_numeric_mode,
        default.decode_numeric_mode,
        default.kv_dtype,
    )
    assert ("torch", "cuda", "q4a8", "float16") == (chosen.backend, chosen.device, chosen.numeric_mode, chosen.kv_dtype)
    for name in ("NUMERIC_MODE", "DECODE_NUMERIC_MODE", "KV_DTYPE", "BACKEND"):
        with pytest.raises(SettingsError, match=f"FIRSTTOKEN_{name}"):
            load(WorkerSettings, {"FIRSTTOKEN_SCRIPTED": "1", f"FIRSTTOKEN_{name}": "fp4"})
