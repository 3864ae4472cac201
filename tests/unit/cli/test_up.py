"""The line to try, and what is told when children fail. The whole command runs in tests/integration/test_up.py."""

import json
import shlex
from pathlib import Path

import pytest

from cli.plan import Deployment
from cli.problem import CommandProblem
from cli.up import curl_line, first_problem


def _deployment(model_dir: Path | None) -> Deployment:
    return Deployment(
        port=8000,
        num_gateways=1,
        num_prefill=1,
        num_decode=1,
        redis_url="redis://127.0.0.1:1/0",
        is_redis_own=True,
        model_dir=model_dir,
        numeric_mode=None,
        served_model_name="m",
        cluster_token="secret",
        num_cores=4,
    )


@pytest.mark.parametrize("model_dir", [None, Path("/models/m")])
def test_the_curl_line_is_what_a_shell_takes(model_dir: Path | None) -> None:
    """Its body is a request that the served model understands; no token is in it."""
    line = curl_line(_deployment(model_dir))

    words = shlex.split(line)
    body = json.loads(words[words.index("-d") + 1])
    assert "http://127.0.0.1:8000/v1/chat/completions" in words
    assert "secret" not in line
    assert "default" == body["model"]
    content = body["messages"][0]["content"]
    if model_dir is None:
        assert {"pieces"} <= json.loads(content).keys()
    else:
        assert content.endswith("?")


def test_one_sentence_is_told_of_several_children() -> None:
    """They usually all complain of the same."""
    first, second = CommandProblem("first"), CommandProblem("second")

    assert first is first_problem(BaseExceptionGroup("", [ExceptionGroup("", [first]), second]))


def test_a_bug_is_not_taken_for_a_sentence() -> None:
    """It keeps its traceback."""
    failures = BaseExceptionGroup("", [CommandProblem("first"), KeyError("bug")])

    assert failures is first_problem(failures)
