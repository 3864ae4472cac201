"""Generated code never asks for a newer protobuf than the oldest that we allow."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _lower_bound(name: str) -> str:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (found,) = [each for each in dependencies if re.match(rf"{name}\b(?!-)", each)]
    return found.partition(">=")[2]


def test_messages_load_on_the_oldest_protobuf_allowed() -> None:
    """A generated module checks the runtime at import and refuses an older one than its generator."""
    generators = {
        match[1]
        for path in sorted((ROOT / "shared" / "wire").glob("*_pb2.py"))
        if (match := re.search(r"^# Protobuf Python Version: (\S+)$", path.read_text(), re.MULTILINE))
    }

    (generator,) = generators
    assert _numbers(generator) <= _numbers(_lower_bound("protobuf")) <= _numbers(version("protobuf"))


def test_stubs_load_on_the_oldest_grpc_allowed() -> None:
    """The same check is in the stubs."""
    generators = {
        match[1]
        for path in sorted((ROOT / "shared" / "wire").glob("*_pb2_grpc.py"))
        if (match := re.search(r"GRPC_GENERATED_VERSION = '(\S+)'", path.read_text()))
    }

    (generator,) = generators
    assert _numbers(generator) <= _numbers(_lower_bound("grpcio")) <= _numbers(version("grpcio"))
