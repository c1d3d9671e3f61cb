"""Runs what `./dev` leaves out, part by part, and says how long each takes.

python tests/rest.py                    everything: ports of public suites, other libraries' models,
                                        real servers and programs, storms, benchmarks, mutants
python tests/rest.py ports storm        the parts with one of these words in their name
python tests/rest.py --within 900       for CI: what the last commit touches and a seventh of
                                        the rest, another one each day, for 900 s

Exit code 1 if a part failed. A part that was left out or stopped for lack of time is named.
"""

import argparse
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
WORKERS = os.environ.get("PYTEST_WORKERS", "3")
NO_TESTS = 5  # pytest's exit code where nothing is collected
DAYS = 7


class Part(NamedTuple):
    name: str
    command: tuple[str, ...]  # arguments of this Python
    touched_by: tuple[str, ...]  # Changes of paths that begin so ask for it.


def folders() -> list[str]:
    """The folders of tests that `./dev` runs, by pyproject.toml."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    return [path.removeprefix("tests/") for path in options["ini_options"]["testpaths"]]


def _pytest(*words: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-n", WORKERS, "--dist", "worksteal", *words)


def parts() -> Iterator[Part]:
    """The shortest kinds first."""
    for folder in folders():
        touched = (f"mpframe/{folder}", f"tests/{folder}", "tests/helpers")
        yield Part(f"slow {folder}", _pytest(f"tests/{folder}", "-m", "slow"), touched)
    yield Part("same numbers", _pytest("tests/same_numbers"), ("tests/same_numbers",))
    yield Part("bench", _pytest("tests/bench"), ("scripts", "tests/bench"))
    for file in sorted((TESTS / "ports").glob("test_*.py")):
        path = f"tests/ports/{file.name}"
        engine = ("mpframe/core", "mpframe/precision", "tests/ports")
        yield Part(f"ports {file.stem[5:]}", _pytest(path, "-m", "not storm"), engine)
        if "pytest.mark.storm" in file.read_text():
            yield Part(f"storm ports {file.stem[5:]}", _pytest(path, "-m", "storm"), ())
    yield Part("zoo", _pytest("tests/zoo"), ("tests/zoo",))
    for mutants in sorted(TESTS.glob("mutants/*.toml")):
        files = {node["file"] for node in tomllib.loads(mutants.read_text()).values()}
        touched = (str(mutants.relative_to(ROOT)), *sorted(f"mpframe/{file}" for file in files))
        command = ("tests/mutants/run.py", "--list", mutants.stem)
        yield Part(f"mutants {mutants.stem}", command, touched)
    for folder in folders():
        yield Part(f"storm {folder}", _pytest(f"tests/{folder}", "-m", "storm"), ())


def changed() -> list[str]:
    """The paths that the last commit changed, none where git does not know."""
    command = ["git", "diff", "--name-only", "HEAD~1"]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.split()


def due(every: Iterable[Part], paths: Iterable[str], day: int) -> list[Part]:
    """The parts that a change of `paths` asks for, and then those whose turn is on this day."""
    every, paths = list(every), list(paths)
    asked = [part for part in every if any(path.startswith(part.touched_by) for path in paths)]
    turns = [part for part in every if (crc32(part.name.encode()) - day) % DAYS == 0]
    return list(dict.fromkeys([*asked, *turns]))


def run(part: Part, seconds: float) -> int | None:
    """The exit code of a part, or None if it has not ended within so many seconds."""
    if seconds <= 0:
        return None
    process = subprocess.Popen([sys.executable, *part.command], cwd=ROOT, start_new_session=True)
    try:
        return process.wait(min(seconds, threading.TIMEOUT_MAX))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:  # With all that it has started.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(*arguments: str) -> int:
    parser = argparse.ArgumentParser(description="Runs what ./dev leaves out.")
    parser.add_argument("words", nargs="*", help="of the parts' names")
    about = "seconds: a share of the parts, for CI"
    parser.add_argument("--within", type=float, default=float("inf"), help=about)
    options = parser.parse_args(arguments)
    words = options.words or [""]
    chosen = [part for part in parts() if any(word in part.name for word in words)]
    if options.within < float("inf"):
        chosen = due(chosen, changed(), datetime.date.today().toordinal())
    failed, began = [], time.monotonic()
    for part in chosen:
        print(f"+ {part.name}", flush=True)
        since = time.monotonic()
        code = run(part, began + options.within - since)
        failed += [part.name] if code not in (0, NO_TESTS, None) else []
        late = ", not ended in time" if code is None else ""
        print(f"= {part.name}: {time.monotonic() - since:.0f} s{late}", flush=True)
    print(f"{len(chosen)} parts, {time.monotonic() - began:.0f} s; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
