"""The command as typed: exit codes, and one sentence instead of a traceback."""

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app, main


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["firsttoken", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code if isinstance(ended.value.code, int) else -1


def test_a_taken_port_ends_up_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 before anything is prepared or started."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if port > 64535:
            pytest.skip("the kernel chose a port that has no admin port")
        code = _run(monkeypatch, "up", "--scripted", "--port", str(port), "--home", str(tmp_path / "home"))

    captured = capsys.readouterr()
    assert 1 == code
    assert "" == captured.out
    assert captured.err.startswith(f"firsttoken: port {port} is taken")
    assert not (tmp_path / "home").exists()


def test_a_home_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "home").write_text("")
    port = str(min(unused_tcp_port, 64_000))

    assert 1 == _run(monkeypatch, "up", "--scripted", "--port", port, "--home", str(tmp_path / "home"))
    assert "cannot be written" in capsys.readouterr().err


def test_status_without_a_system_says_what_to_do(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, nothing on stdout that a program might take for a document."""
    url = f"http://127.0.0.1:{min(unused_tcp_port, 64_000)}"

    assert 1 == _run(monkeypatch, "status", "--json", "--url", url)
    captured = capsys.readouterr()
    assert "" == captured.out
    assert "firsttoken up" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--model", "x", "--scripted"],
        ["up", "--decode", "0"],
        ["up", "--prefill", "1000"],
        ["up", "--port", "65000"],
        ["up", "--port", "64535", "--gateways", "2"],
        ["up", "--gateways", "0"],
        ["chat", "--url", "ftp://host"],
        ["chat", "--temperature", "3"],
        ["up", "--redis-url", "http://x", "--scripted"],
        ["serve"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And starts nothing."""
    monkeypatch.setenv("FIRSTTOKEN_HOME", str(tmp_path / "home"))

    assert 2 == _run(monkeypatch, *arguments)
    assert not (tmp_path / "home").exists()


def test_chat_without_a_system_says_what_to_do(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 before anything is typed; all the gateways that were tried are named."""
    urls = [f"http://127.0.0.1:{unused_tcp_port}", "http://127.0.0.1:1"]

    assert 1 == _run(monkeypatch, "chat", "--url", urls[0], "--url", urls[1])
    captured = capsys.readouterr()
    assert "" == captured.out
    assert f"{urls[0]} or {urls[1]}" in captured.err


def test_help_names_the_commands() -> None:
    """The hidden preparation is set-up's business."""
    out = CliRunner().invoke(app, ["--help"]).output

    assert "up" in out
    assert "chat" in out
    assert "status" in out
    assert "prepare" not in out
