"""What the assembled application is, and is not."""

import subprocess
import sys
from pathlib import Path

from tests.support.gateway_app import running_gateway

PATHS = {
    ("/v1/chat/completions", "POST"),
    ("/api/chat", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name:path}", "GET"),
    ("/v1/requests/{request_id:path}", "DELETE"),
    ("/v1/streams/{request_id:path}", "DELETE"),
    ("/v1/streams/{request_id:path}", "GET"),
}

NO_TORCH = """
import sys
from pathlib import Path
import gateway.app
from gateway.intake import IntakeReader
from shared.text.chat import ChatTokenizer
model_dir = sys.argv[1]
tokenizer = ChatTokenizer.load(Path(model_dir)) if model_dir else ChatTokenizer.scripted()
content = "What is the capital of France?" if model_dir else '{\\\\"pieces\\\\": [\\\\"a\\\\"]}'
body = '{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % content
intake = IntakeReader(tokenizer, "m").read_completion(body.encode())
assert len(intake.prompt_ids) > 5
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "numba")))
"""


async def test_there_are_no_other_routes() -> None:
    """No documentation pages, no health on the clients' port."""
    async with running_gateway() as running:
        routes = {
            (getattr(route, "path", ""), method)
            for route in running.gateway.app.routes
            for method in getattr(route, "methods", ())
        }

    assert PATHS == routes


def test_a_real_chat_is_tokenised_without_torch() -> None:
    """In a fresh process; with a prepared model where there is one, since its tokenizer could bring torch along."""
    folders = sorted(Path.home().glob(".firsttoken/models/*/firsttoken.json"))
    model_dir = str(folders[0].parent) if folders else ""

    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, model_dir], check=False, capture_output=True, text=True, timeout=200
    )

    assert (0, "[]\n") == (done.returncode, done.stdout), done.stderr
