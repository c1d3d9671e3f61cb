"""callbacks=larc: a run with it resumes bit for bit, and says what it cannot stand beside."""

from pathlib import Path

import pytest
from in_process import StartRun, scalars
from omegaconf import OmegaConf
from sameness import assert_same_run, cut, differing, results

from mpframe.config.locations import CONF
from mpframe.core.errors import ConfigError

SMALL = [
    *("model=mlp", "model.hidden=8", "optimizer=sgd", "trainer.max_steps=6", "trainer.log_every=1"),
    *("trainer.checkpoint_every=2", "trainer.keep_last=10", "dataset.batch_size=256"),
]
WEIGHTS = ("hidden1.linear", "hidden2.linear", "head")
LARC = ["callbacks=larc", "callbacks.larc.eta=1e-4", "callbacks.larc.without=[*.bias]"]


def test_a_run_with_it_resumes_bit_for_bit(start_run: StartRun, tmp_path: Path) -> None:
    options = [*SMALL, *LARC, "dtype=mixed"]
    start_run(tmp_path / "whole", *options)
    resumed = cut(tmp_path / "whole", tmp_path / "resumed", 4)
    start_run(resumed, *options, "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)
    rates = dict(scalars(tmp_path / "resumed"))
    assert {tag for tag in rates if "larc" in tag} == {f"larc/rate/{w}.weight" for w in WEIGHTS}
    steps, values = zip(*rates["larc/rate/head.weight"], strict=True)
    assert steps == (1, 2, 3, 4, 5, 6)
    rate = OmegaConf.load(CONF / "optimizer" / "sgd.yaml").lr
    assert all(0 < value < rate for value in values)
    start_run(tmp_path / "without", *SMALL, "dtype=mixed")
    with_it, without = (
        results(tmp_path / run)["state"]["trainer"]["weights"] for run in ("whole", "without")
    )
    assert len(differing(with_it, without)) == len(without)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["trainer.clip_norm=1.0"],
         "trainer.clip_norm=1.0: LARC scales each gradient after the clipping, and would undo it; "
         "set trainer.clip_norm=null, or leave callbacks=larc out"),
        (["callbacks.larc.eta=0"], "larc.eta=0: must be a finite number > 0; 0.001 is usual"),
        (["optimizer=own", "optimizer._target_=torch.optim.LBFGS", "dtype=fp32", "scheduler=none",
          "loss_scaling=none"],
         "callbacks.larc: the optimizer makes its gradients within its step, where no hook reaches "
         "them; choose an optimizer without a closure"),
    ],
)  # fmt: skip
def test_what_it_cannot_stand_beside_is_refused(
    start_run: StartRun, tmp_path: Path, more: list[str], line: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        start_run(tmp_path, *SMALL, *LARC, *more)
    assert str(refused.value) == line


def test_a_penalty_is_chosen_by_options(start_run: StartRun, tmp_path: Path) -> None:
    penalty = ["callbacks=penalty", "callbacks.penalty.without=[*.bias]", "dtype=mixed"]
    own = ["callbacks.penalty.penalty._target_=torch.linalg.norm", "callbacks.penalty.strength=0.1"]
    runs = {
        "none": ["dtype=mixed"],
        "l1": [*penalty, "callbacks.penalty.strength=0.1"],
        "l2": [*penalty, "callbacks.penalty.strength=0.1", "callbacks.penalty.penalty.ord=2"],
        "own": [*penalty, *own, "callbacks.penalty.penalty.ord=fro"],
    }
    sizes = {}
    for name, more in runs.items():
        start_run(tmp_path / name, *SMALL, "scheduler=none", "optimizer.lr=0.1", *more)
        weights = results(tmp_path / name)["state"]["trainer"]["weights"]
        sizes[name] = float(weights["head.weight"].abs().sum())
    assert sizes["l1"] < sizes["l2"] < sizes["none"]
    # The Frobenius norm is another way to write the 2-norm of all values.
    assert sizes["own"] == pytest.approx(sizes["l2"], rel=2.0**-10)
