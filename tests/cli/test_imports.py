"""What is imported: a run loads what its configuration names, and the engine stands by itself."""

import json
import subprocess
import sys
from pathlib import Path

UNUSED = """workloads.gan workloads.speech workloads.tables workloads.text workloads.detection
    workloads.segmentation data.cifar data.image_files lab.report lab.doctor lab.ranges
    lab.range_watch lab.search lab.simulation lab.autopsy.evidence lab.autopsy.replay
    lab.autopsy.diagnosis checkpoint.export_graph checkpoint.init_from
    training.callbacks.step_hooks training.optimizers.lbfgs training.optimizers.multi_objective
    training.callbacks.profile training.callbacks.utilization training.callbacks.gradient_norms
    tracking.json_lines integrations lab.find lab.validation data.streaming data.shares"""
STEPS = "trainer.max_steps=3"
WORDS = {
    "default": f"model=mlp {STEPS}",
    "gan": f"model=gan dataset=digits_gan optimizer=gan {STEPS} numerics=on",
    "overflow": f"model=mlp {STEPS} callbacks.autopsy.after=1 loss_scaling=Backoff "
    "loss_scaling.init_scale=16777216",
    "engine": "",
}
# A Python that has imported no module of mpframe forks one process for each of the programs.
FORKING = """
import json, os, sys, traceback
import hydra, matplotlib.figure, sklearn.datasets, tensorboard, torch, torch._dynamo, torchvision
for name, words in json.loads(sys.argv[1]).items():
    child = os.fork()
    if not child:
        try:
            if words:
                sys.argv[:] = ["train.py", *words.split(), f"hydra.run.dir=run_of_{name}"]
                from mpframe.cli.commands.train import main
                main()
            from mpframe import Backoff, Precision
            with open(name, "w") as file:
                json.dump([own for own in sys.modules if own.partition(".")[0] == "mpframe"], file)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(child, 0)
"""


def within(names: set[str], *packages: str) -> list[str]:
    """Those of the names that are one of the packages, or in one."""
    places = [f"mpframe.{package}" for package in packages]
    return sorted(n for n in names if any(n == p or n.startswith(f"{p}.") for p in places))


def test_a_program_imports_what_it_uses(tmp_path: Path) -> None:
    words = [sys.executable, "-c", FORKING, json.dumps(WORDS)]
    subprocess.run(words, cwd=tmp_path, timeout=300, check=True)
    imported = (set(json.loads((tmp_path / name).read_text())) for name in WORDS)
    default, gan, overflow, engine = imported
    assert 50 < len(default) <= 150, sorted(default)
    assert within(default, *UNUSED.split()) == []
    assert engine - {"mpframe", *within(engine, "core")} == set()
    assert within(engine, "core.loss_scaling")
    assert within(overflow, "lab.autopsy.diagnosis")
    assert not within(overflow, "lab.range_watch")
    assert within(gan, "lab.ranges")
    assert not within(gan, "lab.autopsy.diagnosis")
    own = ["mpframe.workloads", "mpframe.workloads.gan", "mpframe.workloads.images"]
    assert within(gan, "workloads") == own
