"""Which processes run, with what environment."""

from dataclasses import replace
from pathlib import Path

from cli.plan import Deployment, DrainStage, base_environ, plan_services


def _deployment(
    *,
    num_gateways: int = 1,
    num_prefill: int = 1,
    num_decode: int = 1,
    model_dir: Path | None = None,
    is_redis_own: bool = True,
) -> Deployment:
    return Deployment(
        port=8000,
        num_gateways=num_gateways,
        num_prefill=num_prefill,
        num_decode=num_decode,
        redis_url="redis://127.0.0.1:1/0",
        is_redis_own=is_redis_own,
        model_dir=model_dir,
        numeric_mode=None,
        served_model_name="scripted",
        cluster_token="secret",
        num_cores=4,
    )


def test_workers_have_stable_names() -> None:
    """A restarted worker comes back under the id that it had: the plan names it, not its pid or port."""
    specs = plan_services(_deployment(num_prefill=2, num_decode=3), {})

    assert [
        "scheduler-0",
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
        "decode-2",
        "gateway-0",
    ] == [spec.child_id for spec in specs]
    assert all(spec.child_id == spec.environ["FIRSTTOKEN_WORKER_ID"] for spec in specs)


def test_only_the_gateway_has_a_port_of_its_own() -> None:
    """The kernel chooses the others, so that two systems fit on one machine."""
    ports = {
        spec.child_id: (spec.environ["FIRSTTOKEN_PORT"], spec.environ["FIRSTTOKEN_ADMIN_PORT"])
        for spec in plan_services(_deployment(), {})
    }

    assert {
        "scheduler-0": ("0", "0"),
        "prefill-0": ("0", "0"),
        "decode-0": ("0", "0"),
        "gateway-0": ("8000", "9000"),
    } == ports


def test_gateways_are_neighbours_that_know_each_other() -> None:
    """Ports go up by one from the first, admin ports 1000 above; a gateway alone has no peers."""
    deployment = _deployment(num_gateways=3)
    gateways = [spec for spec in plan_services(deployment, {}) if spec.stage is DrainStage.EDGE]

    assert ["gateway-0", "gateway-1", "gateway-2"] == [spec.child_id for spec in gateways]
    assert ["8000", "8001", "8002"] == [spec.environ["FIRSTTOKEN_PORT"] for spec in gateways]
    assert ["9000", "9001", "9002"] == [spec.environ["FIRSTTOKEN_ADMIN_PORT"] for spec in gateways]
    assert "http://127.0.0.1:9000,http://127.0.0.1:9002" == gateways[1].environ["FIRSTTOKEN_PEERS"]
    assert ("http://127.0.0.1:8000", "http://127.0.0.1:8001", "http://127.0.0.1:8002") == deployment.urls
    assert "" == plan_services(_deployment(), {})[-1].environ["FIRSTTOKEN_PEERS"]


def test_the_gateway_drains_before_the_others() -> None:
    """Its streams are served to their end by those that still run."""
    stages = {spec.child_id: spec.stage for spec in plan_services(_deployment(), {})}

    assert stages["gateway-0"] is DrainStage.EDGE
    assert {DrainStage.CORE} == {stage for child_id, stage in stages.items() if child_id != "gateway-0"}
    assert DrainStage.EDGE < DrainStage.CORE < DrainStage.STATE


def test_a_model_folder_and_the_script_exclude_each_other() -> None:
    """A service refuses to start with both or neither."""
    scripted = plan_services(_deployment(), {})[0].environ
    prepared = plan_services(_deployment(model_dir=Path("/models/m")), {})[0].environ

    assert "true" == scripted["FIRSTTOKEN_SCRIPTED"]
    assert "FIRSTTOKEN_MODEL_DIR" not in scripted
    assert "/models/m" == prepared["FIRSTTOKEN_MODEL_DIR"]
    assert "FIRSTTOKEN_SCRIPTED" not in prepared


def test_settings_around_pass_unless_up_decides_them() -> None:
    """Pool size and log level are the user's; ports, addresses and ids are this run's."""
    around = {
        "PATH": "/bin",
        "FIRSTTOKEN_KV_POOL_MIB": "64",
        "FIRSTTOKEN_PORT": "9",
        "firsttoken_scheduler": "elsewhere:7000",
        "OMP_WAIT_POLICY": "active",
    }

    environ = base_environ(around)

    assert "/bin" == environ["PATH"]
    assert "64" == environ["FIRSTTOKEN_KV_POOL_MIB"]
    assert "FIRSTTOKEN_PORT" not in environ
    assert "firsttoken_scheduler" not in environ
    assert "active" == environ["OMP_WAIT_POLICY"]


def test_waiting_threads_do_not_spin() -> None:
    """By default: two workers share the cores."""
    assert "passive" == plan_services(_deployment(), {})[1].environ["OMP_WAIT_POLICY"]


def test_a_scheduler_of_our_own_need_not_wait_for_another() -> None:
    """On a Redis elsewhere there may be one, and the wait for an absent lease is its protection."""
    own = plan_services(_deployment(is_redis_own=True), {})[0].environ
    shared = plan_services(_deployment(is_redis_own=False), {})[0].environ

    assert "0" == own["FIRSTTOKEN_LEASE_ABSENT_S"]
    assert "FIRSTTOKEN_LEASE_ABSENT_S" not in shared


def test_threads_follow_the_cores_unless_they_are_set() -> None:
    """All cores for each worker; on torch each role shares one half of them; a setting around `up` counts for all."""

    def threads(around: dict[str, str]) -> dict[str, str]:
        services = plan_services(replace(_deployment(), num_prefill=2, num_decode=1, num_cores=4), around)
        return {spec.child_id: spec.environ.get("FIRSTTOKEN_NUM_THREADS", "-") for spec in services}

    assert {"prefill-0": "4", "prefill-1": "4", "decode-0": "4"}.items() <= threads({}).items()
    on_torch = threads({"FIRSTTOKEN_BACKEND": "torch"})
    assert {"prefill-0": "1", "prefill-1": "1", "decode-0": "2"}.items() <= on_torch.items()
    assert {"prefill-0": "3", "decode-0": "3"}.items() <= threads({"FIRSTTOKEN_NUM_THREADS": "3"}).items()
    one_core = replace(_deployment(), num_prefill=1, num_decode=8, num_cores=1)
    assert {"prefill_worker": 1, "decode_worker": 1} == one_core.threads("torch")


def test_a_typed_mode_reaches_every_worker() -> None:
    """Over the setting around `up`, which counts where nothing was typed."""
    around = {"FIRSTTOKEN_NUMERIC_MODE": "q8a16"}
    modes = [
        {spec.environ.get("FIRSTTOKEN_NUMERIC_MODE") for spec in plan_services(deployment, settings)}
        for deployment, settings in (
            (_deployment(), {}),
            (_deployment(), around),
            (replace(_deployment(), numeric_mode="f32"), around),
        )
    ]

    assert [{None}, {"q8a16"}, {"f32"}] == modes
