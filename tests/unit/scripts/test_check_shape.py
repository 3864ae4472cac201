"""The shape check finds what it is there for."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "check_shape.py"


@pytest.fixture
def shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, looking at a small tree: one module with its test, one empty __init__."""
    spec = importlib.util.spec_from_file_location("check_shape", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "GENERATED", tmp_path / "shared" / "wire")
    monkeypatch.setattr(module, "TESTED_ELSEWHERE", {})
    _write(tmp_path, "shared/__init__.py", "")
    _write(tmp_path, "shared/waiting.py", "X = 1\n")
    _write(tmp_path, "tests/unit/shared/test_waiting_order.py", "Y = 1\n")
    _write(tmp_path, "shared/wire/common_pb2.py", "Z = 1\n" * 1000)
    return module


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _problems(shape: ModuleType) -> list[str]:
    return [*shape.size_problems(), *shape.mapping_problems(), *shape.empty_problems()]


def test_a_tree_in_shape_passes(shape: ModuleType) -> None:
    """Generated files have no say; a module's tests may be split."""
    assert [] == _problems(shape)


def test_a_long_file_is_found(shape: ModuleType, tmp_path: Path) -> None:
    """Tests too: a test file of 500 lines tests more than one module."""
    _write(tmp_path, "tests/unit/shared/test_waiting_order.py", "Y = 1\n" * 501)

    (problem,) = _problems(shape)
    assert problem.startswith("tests/unit/shared/test_waiting_order.py: 501 lines")


def test_long_files_as_a_habit_are_found(shape: ModuleType, tmp_path: Path) -> None:
    """No file is too long alone, but the median is."""
    _write(tmp_path, "shared/waiting.py", "X = 1\n" * 200)

    (problem,) = _problems(shape)
    assert "median" in problem


def test_a_module_without_tests_is_found(shape: ModuleType, tmp_path: Path) -> None:
    """And the file that is missing is named; wiring needs none."""
    _write(tmp_path, "shared/kv/layout.py", "X = 1\n")
    _write(tmp_path, "shared/__main__.py", "X = 1\n")

    assert ["shared/kv/layout.py: no tests/unit/shared/kv/test_layout.py"] == _problems(shape)


def test_an_excuse_holds_until_it_is_not_needed(
    shape: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of excuses that only grows would be worth nothing."""
    _write(tmp_path, "shared/ids.py", "X = 1\n")
    monkeypatch.setattr(shape, "TESTED_ELSEWHERE", {"shared/ids.py": "types only"})
    assert [] == _problems(shape)

    _write(tmp_path, "tests/unit/shared/test_ids.py", "Y = 1\n")
    assert ["shared/ids.py: has tests now, take it off the list in check_shape.py"] == _problems(shape)


def test_a_test_or_an_excuse_without_its_module_is_found(
    shape: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left over after a rename."""
    _write(tmp_path, "tests/unit/shared/test_gone.py", "Y = 1\n")
    monkeypatch.setattr(shape, "TESTED_ELSEWHERE", {"shared/left.py": "types only"})

    assert [
        "shared/left.py: named in check_shape.py, but gone",
        "tests/unit/shared/test_gone.py: there is no module that it tests",
    ] == _problems(shape)


def test_an_empty_module_is_found(shape: ModuleType, tmp_path: Path) -> None:
    """A place kept for later is not a module."""
    _write(tmp_path, "shared/waiting.py", "")

    assert ["shared/waiting.py: empty"] == shape.empty_problems()
