"""Trains real models in every mode beside torch, and says where they come out otherwise.

Each model has a process of its own, and a time limit, so that none stops the others. Exit code 1
where one of them fails. `pip install -e ".[zoo]"` for the libraries; nothing is downloaded.
"""

import argparse
import importlib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
LIBRARIES = ("torchvision", "timm", "transformers", "diffusers")
LIMIT = 300.0  # seconds a model may take


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prefixes", nargs="*", help="library/name or its beginning")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds a model may take")
    parser.add_argument("--write", action="store_true", help="write zoo.csv and README.md")
    asked = parser.parse_args()
    names = [n for n in _names() if n.startswith(tuple(asked.prefixes) or "")]
    rows = []
    for row in _measured(names, asked.jobs, asked.limit):
        rows.append(row)
        verdict = "; ".join(row.failures) or f"agrees ({row.seconds:.1f} s)"
        said = f"not built: {row.built}" if row.built else verdict
        print(f"[{len(rows)}/{len(names)}] {row.name}: {said}", flush=True)
        if asked.write:
            import page

            page.write([row])  # At once: what was measured stays if the run is interrupted.
    failed = [row for row in rows if row.failures]
    print(f"{len(rows)} models, {sum(not r.built for r in rows)} built, {len(failed)} failed")
    return 1 if failed else 0


def _names() -> list[str]:
    found = [library for library in LIBRARIES if find_spec(library)]
    for library in sorted(set(LIBRARIES) - set(found)):
        print(f"{library} is not installed: left out")
    return [f"{lib}/{n}" for lib in found for n in importlib.import_module(f"{lib}_models").names()]


def _measured(names: list[str], jobs: int, limit: float) -> Iterator[Any]:
    """The rows, as they come; at most `jobs` processes at a time.

    They are forked from a server that has imported the libraries and has no threads.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
    from comparison import Row

    def measured(name: str) -> Row:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=measure, args=(name, theirs))
        process.start()
        theirs.close()
        try:
            if ours.poll(limit):
                return ours.recv()  # type: ignore[no-any-return]
            return Row(name, failures=[f"more than {limit:.0f} s"])
        except EOFError:
            process.join()
            return Row(name, failures=[f"its process died (exit code {process.exitcode})"])
        finally:
            process.kill()
            process.join()

    with ThreadPool(jobs) as pool:
        yield from pool.imap_unordered(measured, names)


def measure(name: str, answer: Connection) -> None:
    import torch
    from comparison import Row, compare

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    library, model = name.split("/", 1)
    with redirect_stderr(StringIO()):
        try:
            row = compare(name, importlib.import_module(f"{library}_models").build(model))
        except Exception as error:  # torch alone cannot train it: not a matter of precision
            reason = str(error).splitlines()[0] if str(error) else ""
            row = Row(name, built=f"{type(error).__name__}: {reason}")
        answer.send(row)


if __name__ == "__main__":
    raise SystemExit(main())
