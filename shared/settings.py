"""Settings from FIRSTTOKEN_* variables: typed, frozen, all mistakes in one report. Reads no environment by itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

ENV_PREFIX = "FIRSTTOKEN_"
ADMIN_PORT_OFFSET = 1000  # decisions §0: admin HTTP = port + 1000
SCRIPTED_MODEL_NAME = "scripted"
KV_TRANSPORTS = ("shm", "grpc")

NumericModeName = Literal["f32", "q4f32", "q4a16", "q4a8", "q8a16", "bf16"]
"""As `shared.model.numerics` has them, which is a layer above."""

Port = Annotated[int, Field(ge=0, le=65535)]
"""0 = the kernel chooses."""


class SettingsError(Exception):
    """Every bad variable, one sentence each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ServiceSettings(BaseSettings):
    """What every service knows. A service's own settings subclass it and give `port` a default."""

    model_config = SettingsConfigDict(frozen=True, env_prefix=ENV_PREFIX, env_ignore_empty=True)

    host: str = "127.0.0.1"  # where it listens
    port: Port = 0  # 0 = the kernel chooses
    admin_port: Port | None = None  # - = port + 1000
    cluster_token: SecretStr = SecretStr("")  # on every internal call; `up` makes one a run
    redis_url: str = "redis://127.0.0.1:6379/0"  # must have maxmemory-policy noeviction
    # Without a reply in this time Redis is away, and new requests are refused.
    redis_timeout_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    scheduler: str | None = None  # "host:port": used instead of the lease lookup
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"  # state changes are at DEBUG
    drain_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0  # Kubernetes' default grace period

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` hands in: constructing settings in a test depends on nothing around it."""
        return (init_settings,)

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: str) -> str:
        if urlsplit(url).scheme not in ("redis", "rediss", "unix"):
            raise ValueError("must start with redis://, rediss:// or unix://")
        return url

    @field_validator("scheduler")
    @classmethod
    def _check_scheduler(cls, address: str | None) -> str | None:
        if address is not None:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError("must be host:port")
        return address

    @property
    def chosen_admin_port(self) -> int:
        """0 = the kernel chooses."""
        if self.admin_port is not None:
            return self.admin_port
        return self.port + ADMIN_PORT_OFFSET if self.port else 0


class ModelSettings(ServiceSettings):
    """For those who serve a model: exactly one of `model_dir` and `scripted` is given."""

    model_dir: Path | None = None  # a prepared folder
    scripted: bool = Field(default=False, validate_default=True)  # or this: the deterministic generator
    served_model_name: str = Field(default="", validate_default=True)  # what clients call it

    @field_validator("model_dir")
    @classmethod
    def _check_model_dir(cls, model_dir: Path | None) -> Path | None:
        if model_dir is not None and not model_dir.is_dir():
            raise ValueError("must be a folder")
        return model_dir

    @field_validator("scripted")
    @classmethod
    def _check_one_model(cls, scripted: bool, info: ValidationInfo) -> bool:
        if "model_dir" in info.data and scripted == (info.data["model_dir"] is not None):
            raise ValueError(f"give exactly one of {ENV_PREFIX}MODEL_DIR and {ENV_PREFIX}SCRIPTED")
        return scripted

    @field_validator("served_model_name")
    @classmethod
    def _default_name(cls, name: str, info: ValidationInfo) -> str:
        if name:
            return name
        return SCRIPTED_MODEL_NAME if info.data.get("scripted") else "SmolLM2-135M-Instruct"


class WorkerSettings(ModelSettings):
    """What prefill and decode workers have in common."""

    worker_id: str = ""  # "" = role and port
    kv_pool_mib: Annotated[int, Field(ge=0)] = 512  # SmolLM2: 11,000 tokens; 0 = a quarter of the memory left
    num_threads: Annotated[int, Field(ge=1)] | None = None  # None = all cores
    block_size: Annotated[int, Field(ge=1, le=256)] = 16  # tokens; the same on all workers
    backend: Literal["cpu", "torch"] = "cpu"  # torch is the reference: slower, but on any device
    device: str = "cpu"  # of the torch backend
    # None = what preparation found right for the model. Both roles must be told the modes of both.
    numeric_mode: NumericModeName | None = None
    prefill_numeric_mode: NumericModeName | None = None  # None = `numeric_mode`
    decode_numeric_mode: NumericModeName | None = None
    # float16 and bfloat16 halve the cache and what a hand-over moves; float32 is what equality with
    # transformers is claimed for.
    kv_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    transports: str = "shm,grpc"  # of KV, best first; shm where a pair proves that it shares a host

    @field_validator("transports")
    @classmethod
    def _check_transports(cls, transports: str) -> str:
        names = _names(transports)
        if not names or len(set(names)) != len(names) or not set(names) <= set(KV_TRANSPORTS):
            raise ValueError(f"must be some of {', '.join(KV_TRANSPORTS)}, each once, with commas between")
        return transports

    @property
    def kv_transports(self) -> tuple[str, ...]:
        """Best first."""
        return _names(self.transports)


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())


Config = TypeVar("Config", bound=ServiceSettings)


def load(config_type: type[Config], environ: Mapping[str, str]) -> Config:
    """Raises SettingsError that names every bad variable. An empty one counts as absent, an unknown one is ignored."""
    source = EnvSettingsSource(config_type)
    source.env_vars = {name.lower(): value for name, value in environ.items() if value != ""}
    try:
        return config_type(**source())
    except ValidationError as error:
        problems = [
            f"{ENV_PREFIX}{'.'.join(str(part) for part in problem['loc']).upper()}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        ]
        raise SettingsError(problems) from None


def describe(config: ServiceSettings) -> dict[str, str]:
    """Every setting as text, secrets hidden: for the line that a service logs at its start."""
    values = {name: str(getattr(config, name)) for name in sorted(type(config).model_fields)}
    url = urlsplit(config.redis_url)
    if url.password is not None:
        values["redis_url"] = url._replace(netloc=f"***@{url.netloc.rpartition('@')[2]}").geturl()
    return values
