import json
import logging

import pytest
import structlog

from shared.obs import logs


def read_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    """Every line on stderr is one JSON object."""
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_with_bound_context(capsys: pytest.CaptureFixture[str]) -> None:
    """A line has its fields, the bound context, role, level and time; lower levels are left out."""
    logs.configure("decode", "INFO")
    log = logs.get_logger("tables")
    with structlog.contextvars.bound_contextvars(request_id="01J", attempt=1):
        log.info("released", blocks=3)
        log.debug("not shown")

    (line,) = read_lines(capsys)
    assert line.pop("timestamp")
    assert line == {
        "event": "released",
        "component": "tables",
        "blocks": 3,
        "request_id": "01J",
        "attempt": 1,
        "role": "decode",
        "level": "info",
    }


def test_traceback_holds_no_values(capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt in a local variable does not reach the log with a traceback, from us or from a library."""
    logs.configure("decode", "INFO")

    def fail() -> None:
        prompt = "a very " + "private prompt"
        raise KeyError(len(prompt))

    try:
        fail()
    except KeyError:
        logs.get_logger("tables").exception("failed")
        logging.getLogger("some.library").exception("failed too")

    ours, theirs = read_lines(capsys)
    for line in (ours, theirs):
        assert "KeyError" in str(line["exception"])
        assert "private prompt" not in str(line)


def test_chatty_libraries_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    """uvicorn and grpc speak from WARNING on."""
    logs.configure("gateway", "INFO")
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("uvicorn.error").warning("odd")

    assert ["odd"] == [line["event"] for line in read_lines(capsys)]
