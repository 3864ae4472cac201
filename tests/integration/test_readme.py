"""The README's first screen, as written: whoever copies it gets an answer."""

import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, ClusterPlan

README = Path(__file__).resolve().parents[2] / "README.md"
WRITTEN_URL = "http://127.0.0.1:8000"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def system() -> Generator[Cluster]:
    """With the default model, as `make run` starts it."""
    with ClusterPlan().start() as cluster:
        yield cluster


def _block(language: str, holding: str) -> str:
    """The first code block of a language that holds a word."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if holding in block)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_line(system: Cluster) -> None:
    """A stream of chunks with text, ended by [DONE]."""
    line = _block("sh", "curl").replace(WRITTEN_URL, system.base_url)

    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True, timeout=120, text=True)

    assert done.stdout.count('"delta": {"content": ') >= 1
    assert "data: [DONE]" == done.stdout.rstrip().splitlines()[-1]


def test_the_openai_client(system: Cluster) -> None:
    """Five lines; at temperature 0 the answer is decided by the weights."""
    code = _block("python", "openai").replace(WRITTEN_URL, system.base_url)

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=120, text=True)

    assert 5 == len([line for line in code.splitlines() if line])
    assert "Paris" in done.stdout
