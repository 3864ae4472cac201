"""Generates shared/wire from proto/, or with --check fails if the committed files differ from what would come out.

protoc gets a virtual root (`-Ishared/wire=proto`), so that generated code imports `shared.wire…` without being edited.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
WIRE = Path("shared/wire")


def generate(into: Path) -> None:
    """Writes `into`/shared/wire/*_pb2*. Exits with protoc's own message if a file is wrong."""
    outputs = [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    sources = [str(path.relative_to(ROOT)) for path in sorted(PROTO.glob("*.proto"))]
    plugins = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "grpc_tools.protoc", f"-I{WIRE}={PROTO.relative_to(ROOT)}", *outputs, *sources],
        cwd=ROOT,
        env=plugins,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(done.stderr)


def generated_in(folder: Path) -> dict[str, str]:
    """Name → text of the generated files."""
    return {path.name: path.read_text() for path in sorted((folder / WIRE).glob("*_pb2*.py*"))}


def main() -> None:
    """`--check` compares, else the files are written."""
    if sys.argv[1:] != ["--check"]:
        for path in (ROOT / WIRE).glob("*_pb2*.py*"):
            path.unlink()
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh, committed = generated_in(Path(folder)), generated_in(ROOT)
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    if stale:
        sys.exit(f"shared/wire is not what proto/ gives ({', '.join(stale)}): run `make proto` and commit")


if __name__ == "__main__":
    main()
