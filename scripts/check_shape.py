"""The shape of the tree, held by a machine: file sizes, a test file for each module, nothing empty."""

import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "scheduler", "prefill_worker", "decode_worker", "shared", "cli")
GENERATED = ROOT / "shared" / "wire"

MAX_LINES = 500  # a file that long holds more than one idea
MAX_P90_LINES = 350
MAX_MEDIAN_LINES = 150

# Modules without a unit test of their own, each with the reason. A reason that no longer holds is an error too.
TESTED_ELSEWHERE: dict[str, str] = {
    "cli/problem.py": "a sentence and an exit code; every test of cli looks at both",
    "decode_worker/receiver.py": "means something only with a sender: tests/contract/test_kv_transfer.py",
    "decode_worker/worker.py": "wires the parts: tests/contract/test_worker_pair.py and every integration test run it",
    "gateway/services.py": "what sessions are made from, without behaviour",
    "prefill_worker/worker.py": "wires the parts: tests/contract/test_worker_pair.py and every integration test run it",
    "scheduler/adoption.py": "part of the core: tests/scenario and tests/property/test_scheduler_core.py",
    "scheduler/core.py": "by its transcripts, tests/scenario, and tests/property/test_scheduler_core.py",
    "scheduler/messages.py": "vocabulary of the core, without behaviour",
    "scheduler/sessions.py": "part of the core: tests/scenario and tests/property/test_scheduler_core.py",
    "shared/domain/clock.py": "a protocol",
    "shared/domain/ids.py": "types, and a key that prints itself",
    "shared/domain/logged.py": "fields, and the number of the last token: test_logged.py of shared/codec",
    "shared/domain/lifecycle_events.py": "vocabulary of the table, without behaviour",
    "shared/domain/lifecycle_record.py": "what the table moves, without behaviour: test_lifecycle.py",
    "shared/model/format_weights.py": "what it gives is what is packed and computed: test_pack.py, test_model_families",
    "shared/model/gguf_source.py": "one half of preparation: test_prepare.py, test_model_families.py",
    "shared/model/gguf_tensors.py": "its numbers are those of transformers: test_model_families.py",
    "shared/model/hf_source.py": "the other half: test_prepare.py, on a small folder",
    "shared/model/prepared.py": "what preparation writes is what it reads: test_prepare.py",
    "shared/model/torch_cache.py": "means something only in a forward pass: test_torch_model.py",
    "shared/model/kernels/cpu/attention.py": "part of a step: test_step.py by its numbers, test_model.py by its bits",
    "shared/model/kernels/cpu/attention_tile.py": "means something only under attention.py: test_step.py",
    "shared/model/kernels/cpu/jit.py": "how to compile, in two lines; whatever is compiled tests it",
    "shared/model/kernels/cpu/words.py": "single machine instructions: test_team.py",
    "shared/state/cancellation.py": "needs a real store: tests/contract/test_cancellation.py",
    "shared/state/client.py": "needs a real store: tests/contract/test_state_client.py",
    "shared/state/embedded.py": "is a real store: tests/contract/test_embedded.py",
    "shared/state/leadership.py": "needs a real store: tests/contract/test_lease.py",
    "shared/state/lease.py": "with a hand-made clock, on a real store: tests/contract/test_lease.py",
    "shared/state/locate.py": "needs a real store: tests/contract/test_lease.py",
    "shared/state/requests.py": "needs a real store: tests/contract/test_request_store.py",
    "shared/state/stream_log.py": "needs a real store: tests/contract/test_stream_log.py",
}

# Every package has these two; what they do is seen when the process runs.
WIRING = {"__main__.py": "starts the process: every integration test runs it"}


def modules() -> list[Path]:
    """Hand-written modules of the six packages, relative to the root."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in found if GENERATED not in path.parents)


def python_files() -> list[Path]:
    """Modules, scripts and tests."""
    others = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    return [*modules(), *sorted(path.relative_to(ROOT) for path in others)]


def num_lines(path: Path) -> int:
    """Of one file."""
    return len((ROOT / path).read_text().splitlines())


def size_problems() -> list[str]:
    """Too long, or long as a habit."""
    problems = [
        f"{path}: {lines} lines, at most {MAX_LINES}: split it"
        for path in python_files()
        if (lines := num_lines(path)) > MAX_LINES
    ]
    sizes = sorted(num_lines(path) for path in modules() if path.name != "__init__.py")
    median, p90 = statistics.median(sizes), sizes[int(len(sizes) * 0.9)]
    if median > MAX_MEDIAN_LINES:
        problems.append(f"the median module has {median:.0f} lines, at most {MAX_MEDIAN_LINES}")
    if p90 > MAX_P90_LINES:
        problems.append(f"one module in ten has {p90} lines or more, at most {MAX_P90_LINES}")
    return problems


def unit_tests_of(module: Path) -> list[Path]:
    """tests/unit mirrors the packages; a module's tests may be split: test_<module>.py, test_<module>_<part>.py."""
    folder = ROOT / "tests" / "unit" / module.parent
    return sorted([*folder.glob(f"test_{module.stem}.py"), *folder.glob(f"test_{module.stem}_*.py")])


def mapping_problems() -> list[str]:
    """A module without tests, an excuse that is not needed or has no module, a test without a module."""
    problems: list[str] = []
    known = {str(path) for path in modules()}
    for module in modules():
        if module.name == "__init__.py" or module.name in WIRING:
            continue
        has_tests, has_excuse = bool(unit_tests_of(module)), str(module) in TESTED_ELSEWHERE
        if not has_tests and not has_excuse:
            problems.append(f"{module}: no tests/unit/{module.parent}/test_{module.stem}.py")
        if has_tests and has_excuse:
            problems.append(f"{module}: has tests now, take it off the list in {Path(__file__).name}")
    problems += [f"{name}: named in {Path(__file__).name}, but gone" for name in TESTED_ELSEWHERE if name not in known]
    claimed = {test for module in modules() for test in unit_tests_of(module)}
    for package in PACKAGES:
        for test in sorted((ROOT / "tests" / "unit" / package).rglob("test_*.py")):
            if test not in claimed:
                problems.append(f"{test.relative_to(ROOT)}: there is no module that it tests")
    return problems


def empty_problems() -> list[str]:
    """Only a package's __init__ may be empty."""
    return [f"{path}: empty" for path in python_files() if path.name != "__init__.py" and num_lines(path) == 0]


def main() -> None:
    """Lists everything that is wrong."""
    problems = [*size_problems(), *mapping_problems(), *empty_problems()]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
