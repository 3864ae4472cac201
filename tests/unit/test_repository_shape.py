"""The six importable names are ours and nobody else's; what is promised about the tree is held."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("gateway", "scheduler", "prefill_worker", "decode_worker", "shared", "cli")


@pytest.mark.parametrize("name", NAMES)
def test_an_importable_name_comes_from_this_checkout(name: str) -> None:
    """Generic names are an invitation: another wheel may bring a package `shared` or `gateway` along."""
    spec = importlib.util.find_spec(name)

    assert spec is not None
    assert spec.origin is not None
    assert ROOT / name / "__init__.py" == Path(spec.origin).resolve()


@pytest.mark.parametrize("name", NAMES)
def test_no_other_distribution_provides_an_importable_name(name: str) -> None:
    """Even one that happens to lose on the path today."""
    assert {"firsttoken"} == set(packages_distributions()[name])


def test_there_are_no_more_importable_names() -> None:
    """A seventh top-level package is a decision (docs/adr/0001), not an accident."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}

    assert {f"{name}*" for name in NAMES} == set(patterns)
    assert set(NAMES) == folders


def test_the_import_contracts_know_all_names() -> None:
    """A package that import-linter does not read is a package without rules."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert set(NAMES) == set(project["tool"]["importlinter"]["root_packages"])


def test_a_service_is_found_without_the_working_directory(tmp_path: Path) -> None:
    """`python -P -m NAME` works from anywhere, and no file that lies there can take a module's place."""
    (tmp_path / "queue.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "shared.py").write_text("raise SystemExit('shadowed')")
    code = "import queue, shared; print(shared.__file__)"

    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True)

    assert (0, "") == (done.returncode, done.stderr)
    assert ROOT / "shared" / "__init__.py" == Path(done.stdout.strip()).resolve()


def test_every_dependency_is_pinned_to_one_version() -> None:
    """What pyproject.toml names is in constraints.txt, there are exact versions only, and torch has the tried one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    names = {_normal(re.split(r"[\[<>=,; ]", each)[0]) for each in wanted} - {"firsttoken"}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = {_normal(pin.partition("==")[0]) for pin in pins}

    assert [] == [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)]
    assert set() == names - pinned
    assert "torch==2.13.0" in pins
    assert ["torch==2.13.0"] == [each for each in wanted if each.startswith("torch")]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
