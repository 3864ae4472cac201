"""Writes the parts of the documents that follow from the code, or with --check fails if they are stale.

A part lies between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; what is outside is written by people.
"""

import ast
import importlib
import re
import sys
import tokenize
from collections.abc import Callable, Iterable
from pathlib import Path

from shared.domain.errors import ERROR_TABLE
from shared.domain.lifecycle import TABLE
from shared.domain.request import RequestState
from shared.settings import ENV_PREFIX, ServiceSettings

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "scheduler", "prefill_worker", "decode_worker", "shared", "cli")
SERVICES = ("gateway", "scheduler", "prefill_worker", "decode_worker")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


# ---- the map: one line a file


def file_map() -> str:
    """Path and first docstring sentence of each hand-written module."""
    parts: list[str] = []
    for package in PACKAGES:
        paths = sorted(path for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py")
        rows = [(f"`{path.relative_to(ROOT)}`", first_sentence(path)) for path in paths if path.parent.name != "wire"]
        parts.append(f"### {package}/\n{table(('file', 'what it is'), rows)}")
    return "\n\n".join(parts)


def first_sentence(path: Path) -> str:
    """Of the module's docstring, up to the first full stop that ends a sentence."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]


# ---- settings


def settings_table() -> str:
    """Every FIRSTTOKEN_ variable: default, who reads it, why it has that default (the comment beside the field)."""
    configs = {service: config_of(service) for service in SERVICES}
    rows: dict[str, tuple[str, str, list[str]]] = {}
    for service, config in configs.items():
        reasons = field_comments(config)
        for name, field in config.model_fields.items():
            default = show_default(field.get_default(call_default_factory=True, validated_data={}))
            known = rows.setdefault(name, (default, reasons.get(name, ""), []))
            readers = known[2]
            readers.append(service if known[0] == default else f"{service} ({default})")
    return table(
        ("variable", "default", "read by", "notes"),
        (
            (f"`{ENV_PREFIX}{name.upper()}`", default, readers_text(readers), reason)
            for name, (default, reason, readers) in sorted(rows.items())
        ),
    )


def config_of(service: str) -> type[ServiceSettings]:
    """The one settings class that a service's config module defines."""
    module = importlib.import_module(f"{service}.config")
    (config,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ServiceSettings) and value.__module__ == module.__name__
    )
    return config


def show_default(value: object) -> str:
    """As a person would type it."""
    match value:
        case None:
            return "-"
        case "":
            return "-"
        case bool():
            return f"`{str(value).lower()}`"
        case int() | float() | str():
            return f"`{value}`"
        case _:
            return "-"


def readers_text(readers: list[str]) -> str:
    """`all` where every service reads it with the same default."""
    return "all" if readers == list(SERVICES) else ", ".join(readers)


def field_comments(config: type[ServiceSettings]) -> dict[str, str]:
    """The comment on a field's lines, else the comment lines right above it; from the class and its bases."""
    found: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        if not issubclass(kind, ServiceSettings):
            continue
        path = Path(sys.modules[kind.__module__].__file__ or "")
        with path.open("rb") as source:
            comments = [token for token in tokenize.tokenize(source.readline) if token.type == tokenize.COMMENT]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                found |= comments_of_fields(node, comments)
    return found


def comments_of_fields(node: ast.ClassDef, comments: list[tokenize.TokenInfo]) -> dict[str, str]:
    """Field name → comment, for the annotated fields of one class."""
    texts = {token.start[0]: token.string.lstrip("# ").strip() for token in comments}
    alone = {token.start[0] for token in comments if token.line.lstrip().startswith("#")}
    found: dict[str, str] = {}
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            beside = [texts[line] for line in range(field.lineno, (field.end_lineno or 0) + 1) if line in texts]
            above: list[str] = []
            line = field.lineno - 1
            while not beside and line in alone:
                above.insert(0, texts[line])
                line -= 1
            if text := " ".join(beside or above):
                found[field.target.id] = text
    return found


# ---- life cycle and errors


def lifecycle() -> str:
    """A diagram of what changes the state, and the whole table."""
    arrows = sorted(
        {
            (state, next_state, event.__name__)
            for (state, event), row in TABLE.items()
            for next_state in row.nexts
            if next_state is not state
        },
        key=lambda arrow: (ORDER[arrow[0]], ORDER[arrow[1]], arrow[2]),
    )
    labels: dict[tuple[RequestState, RequestState], list[str]] = {}
    for state, next_state, event in arrows:
        labels.setdefault((state, next_state), []).append(event)
    diagram = [f"    {state.name} --> {after.name}: {', '.join(events)}" for (state, after), events in labels.items()]
    rows = sorted(TABLE.items(), key=lambda item: (ORDER[item[0][0]], item[0][1].__name__))
    whole = table(
        ("state", "event", "next", "who reports it"),
        (
            (state.name, event.__name__, ", ".join(after.name for after in row.nexts), row.reported_by)
            for (state, event), row in rows
        ),
    )
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> QUEUED: Admitted", *diagram, "```", "", whole])


ORDER = {state: number for number, state in enumerate(RequestState)}


def errors() -> str:
    """The one error table."""
    return table(
        ("code", "gRPC", "HTTP", "OpenAI type", "OpenAI code", "we retry"),
        (
            (
                f"`{code}`",
                row.grpc_status,
                str(row.http_status),
                f"`{row.openai_type}`",
                f"`{row.openai_code}`",
                "yes" if row.is_retryable else "no",
            )
            for code, row in ERROR_TABLE.items()
        ),
    )


PARTS: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("ARCHITECTURE.md", "files", file_map),
    ("README.md", "settings", settings_table),
    ("docs/lifecycle.md", "lifecycle", lifecycle),
    ("docs/errors.md", "errors", errors),
)


def fill(text: str, name: str, content: str) -> str:
    """The text with one part replaced. Raises ValueError if its marks are missing."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found_begin, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{begin} … {end} is missing")
    return f"{head}{begin}\n{content}\n{end}{tail}"


def main() -> None:
    """`--check` compares, else the files are written."""
    is_check = sys.argv[1:] == ["--check"]
    problems: list[str] = []
    for name, part, make in PARTS:
        path = ROOT / name
        try:
            old = path.read_text()
            new = fill(old, part, make())
        except (FileNotFoundError, ValueError) as error:
            problems.append(f"{name}: {error}")
            continue
        if old == new:
            continue
        if is_check:
            problems.append(f"{name}: stale, run `make docs` and commit")
        else:
            path.write_text(new)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
