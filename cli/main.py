"""The `firsttoken` command: what a person types. Each subcommand's work is in a module of its own."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cli.plan import MAX_GATEWAYS, MAX_WORKERS
from cli.problem import EXIT_USAGE, CommandProblem

DEFAULT_HOME = Path("~/.firsttoken")
DEFAULT_URL = "http://127.0.0.1:8000"

app = typer.Typer(
    name="firsttoken",
    help="Serve a chat model from separate processes: gateway, scheduler, prefill and decode workers, Redis.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

HomeOption = Annotated[
    Path, typer.Option(envvar="FIRSTTOKEN_HOME", help="Where prepared models and the logs of runs are kept.")
]

NumericModeOption = Annotated[
    str | None,
    typer.Option(help="How products are computed: f32, q4f32, q4a16, q4a8, q8a16; default: what suits the model."),
]


@app.command()
def up(
    prefill: Annotated[int, typer.Option(min=1, max=MAX_WORKERS, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=MAX_WORKERS, help="Decode workers.")] = 1,
    model: Annotated[
        str | None, typer.Option(help="A GGUF file, a model folder or a hub id; default: SmolLM2-135M-Instruct.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=64535, help="The gateway's port; its admin port is this + 1000.")
    ] = 8000,
    gateways: Annotated[
        int, typer.Option(min=1, max=MAX_GATEWAYS, help="Gateways, on this port and the next ones.")
    ] = 1,
    redis_url: Annotated[
        str | None, typer.Option(help="A Redis to use; default: an embedded Valkey for this run.")
    ] = None,
    numeric_mode: NumericModeOption = None,
    scripted: Annotated[
        bool, typer.Option("--scripted", help="A deterministic generator in the model's place, for tests.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Run the whole system on this machine; Ctrl-C drains it, a second one ends it at once."""
    from cli.up import UpOptions, run_up  # httpx and the event loop: not for `--help`

    if scripted and model is not None:
        raise CommandProblem("give --model or --scripted, not both", exit_code=EXIT_USAGE)
    options = UpOptions(
        num_gateways=gateways,
        num_prefill=prefill,
        num_decode=decode,
        model=model,
        numeric_mode=numeric_mode,
        port=port,
        redis_url=redis_url,
        is_scripted=scripted,
        home=home.expanduser().absolute(),
    )
    raise typer.Exit(run_up(options, os.environ))


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
    url: Annotated[str, typer.Option(help="The gateway's URL; its admin port (+ 1000) is asked.")] = DEFAULT_URL,
) -> None:
    """Show what runs and what it does now."""
    from cli.status import fetch_status, show_status

    found = fetch_status(url)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        show_status(found, Console())


@app.command()
def chat(
    url: Annotated[
        list[str] | None,
        typer.Option(help="The gateway's URL; given again, another of the same system to go on at."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0, help="0 = always the likeliest token.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of each answer.")] = None,
) -> None:
    """Talk to the model; Ctrl-C stops an answer, Ctrl-D leaves."""
    from cli.chat import ChatOptions, run_chat

    options = ChatOptions(urls=url or [DEFAULT_URL], system=system, temperature=temperature, max_tokens=max_tokens)
    raise typer.Exit(run_chat(options))


@app.command(hidden=True)
def prepare(
    model: Annotated[str | None, typer.Argument(help="As `up --model`.")] = None,
    numeric_mode: NumericModeOption = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Prepare a model without running anything, and print its folder: what set-up does."""
    from cli.prepare import ModelChoice, prepare_model

    choice = ModelChoice.of(model, numeric_mode, os.environ)
    prepared = prepare_model(
        choice, home.expanduser().absolute(), lambda text: print(text, file=sys.stderr, flush=True)
    )
    print(prepared.folder)


def main() -> None:
    """Exit codes: 0 as asked, 1 it did not work, 2 wrong usage, 130 interrupted."""
    try:
        app()
    except CommandProblem as problem:
        print(f"firsttoken: {problem.sentence}", file=sys.stderr)
        sys.exit(problem.exit_code)
