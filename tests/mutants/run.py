"""Breaks the package one line at a time and demands that its tests notice.

python tests/mutants/run.py                 all mutants of every list beside this file
python tests/mutants/run.py unscal          those with this in their name
python tests/mutants/run.py --list data     those of data.toml
python tests/mutants/run.py --control       their tests without any fault: they must pass

Each mutant is put into a copy of the repository in a temporary folder; the checkout is not touched.
There are MUTANT_WORKERS such copies (2 if it is not set), and as many mutants are tried at a time.
Exit code 1 where a mutant survives, or where its line is no longer there. A mutant all of whose
tests skip, for want of a library or a device, is `skipped`: nothing was tried. A test that fails
without the fault proves nothing: --control, which takes a name as well, finds such tests.
"""

import argparse
import compileall
import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import Queue
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SERVER = multiprocessing.get_context("forkserver")
# What most tests need and no mutant touches: imported once, and not for each mutant anew.
SERVER.set_forkserver_preload(
    ["pytest", "torch.testing", "torch._dynamo", "torchvision", "omegaconf", "hydra.compose"]
)
CRASHED = 70  # of pytest itself; Python's own code for it is 1, which means a test that failed
NO_TESTS = 5  # pytest's own code
SKIPPED = 71  # every test: pytest's own code for it is 0, as if all had passed
FOLDERS = ("mpframe", "conf", "docs", "scripts", "tests")
FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")


class Mutant(NamedTuple):
    """A one-line fault: a text that stands once in a file, and pytest's arguments to notice it."""

    name: str
    file: Path
    find: str
    replace: str
    tests: str


def load(wanted: str, part: str = "*") -> list[Mutant]:
    """The mutants whose name holds `wanted`, of every list `<part>.toml` beside this file."""
    mutants = []
    for listing in sorted(Path(__file__).parent.glob(f"{part}.toml")):
        for name, node in tomllib.loads(listing.read_text()).items():
            node["file"] = Path("mpframe") / node["file"]
            mutants += [Mutant(name, **node)] if wanted in name else []
    return mutants


def control(tests: str, copy: Path, passed: str = "passed", failed: str = "FAILED") -> str:
    """`passed`, or what is wrong with tests that meet no fault: they run in a process."""
    paths, _, words = tests.partition(" -k ")
    # Runs side by side would tidy up one another's temporary folders.
    arguments = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={copy}-temporary"]
    arguments += paths.split()
    arguments += ["-k", words] * bool(words)
    code = NO_TESTS
    for kinds in ((), ("-m", "slow")):  # The tests that `./dev` runs, then those it leaves out.
        tried = SERVER.Process(target=_pytest, args=([*arguments, *kinds], copy))
        tried.start()
        tried.join()
        code = tried.exitcode if code == NO_TESTS or tried.exitcode != NO_TESTS else code
        if code not in (0, NO_TESTS):
            break
    said = {0: passed, 1: failed, SKIPPED: "skipped"}
    return said.get(code, f"broken: {code}")


def verdict(mutant: Mutant, copy: Path) -> str:
    """`killed`, or what is wrong with the mutant or its tests."""
    file, original = copy / mutant.file, (ROOT / mutant.file).read_text()
    if original.count(mutant.find) != 1:
        return f"stale: its line stands {original.count(mutant.find)} times in {mutant.file}"
    file.write_text(original.replace(mutant.find, mutant.replace))
    try:
        return control(mutant.tests, copy, "SURVIVED", "killed")
    finally:
        file.write_text(original)


class Outcomes:
    """A plugin of pytest: what has become of the tests' own bodies and set-ups."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if getattr(report, "when", "") == "call" or report.outcome != "passed":
            self.seen.add(report.outcome)

    pytest_collectreport = pytest_runtest_logreport


def _pytest(arguments: list[str], copy: Path) -> None:
    """Run pytest in a process of its own; its exit code is that of pytest."""
    code, stderr = CRASHED, os.fdopen(os.dup(2), "w", buffering=1)
    gc.freeze()  # Collecting what the server has imported takes as long as many a test.
    try:
        _enter(copy)
        import pytest

        outcomes = Outcomes()
        code = int(pytest.main(arguments, plugins=[outcomes]))
        code = SKIPPED if code in (0, NO_TESTS) and outcomes.seen == {"skipped"} else code
    except Exception:
        traceback.print_exc(file=stderr)
    finally:
        sys.exit(code)


def _enter(copy: Path) -> None:
    """From here on `copy` is the package that this process, and those it starts, import."""
    assert "mpframe" not in sys.modules, "the server has imported what a mutant may change"
    os.chdir(copy)
    # pytest would rewrite its plugins, and can't if the server has imported them.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "_hypothesis_pytestplugin"}
    # Ranks that a fault has parted wait for one another.
    os.environ |= {
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "RANKS_PATIENCE": "60",
        **plugins,
    }
    sys.path[:] = [str(copy), *(p for p in sys.path if p != str(Path(__file__).parent))]
    multiprocessing.set_start_method(None, force=True)  # the tests choose as in a new program
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def copies(folder: Path, count: int) -> Queue[Path]:
    """So many copies of what the tests need, to be taken by one mutant at a time."""
    free: Queue[Path] = Queue()
    for number in range(count):
        copy = folder / str(number)
        for name in FOLDERS:
            bytecode = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=bytecode)
        for name in FILES:
            shutil.copy(ROOT / name, copy / name)
        # Compiled once, and known by its source's hash: by its time, a file that changes twice
        # within a second would be taken from the cache.
        compileall.compile_dir(copy, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        free.put(copy)
    return free


def main(*arguments: str) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lists = sorted(file.stem for file in Path(__file__).parent.glob("*.toml"))
    parser.add_argument("name", nargs="?", default="", help="a part of the mutants' names")
    parser.add_argument("--list", default="*", choices=lists, metavar="LIST", help=", ".join(lists))
    parser.add_argument("--control", action="store_true", help="run their tests without faults")
    given = parser.parse_args(arguments)
    mutants = load(given.name, given.list)
    if not mutants:
        parser.error(f"{given.name}: in no mutant's name")
    if given.control:
        tests = sorted({mutant.tests for mutant in mutants})
        return report([(name, name) for name in tests], control, "passed")
    return report([(mutant.name, mutant) for mutant in mutants], verdict, "killed")


def report(cases: Sequence[tuple[str, Any]], judge: Callable[[Any, Path], str], good: str) -> int:
    """Judge each case in a copy of its own and print a line for it; the exit code."""
    workers = int(os.environ.get("MUTANT_WORKERS", "2"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        free = copies(Path(folder), workers)

        def tried(case: Any) -> tuple[str, float]:
            copy, start = free.get(), time.monotonic()
            try:
                return judge(case, copy), time.monotonic() - start
            finally:
                free.put(copy)

        verdicts = []
        outcomes = pool.map(tried, [own for _, own in cases])
        for (name, _), (own, seconds) in zip(cases, outcomes, strict=True):
            verdicts.append(own)
            print(f"{own:10} {seconds:5.1f} s  {name}", flush=True)
    count, skipped = verdicts.count(good), verdicts.count("skipped")
    print(f"{count} of {len(cases)} {good}" + (f", {skipped} skipped" if skipped else ""))
    return 0 if cases and count + skipped == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
