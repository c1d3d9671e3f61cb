"""The detection experiments: trained, resumed, looked into, evaluated and handed on."""

from pathlib import Path

import pytest
from conftest import StartRun
from sameness import assert_same_run
from test_resume import cut

TINY = [
    "experiment=detection_ssd_small", "device=cpu", "model.width=4", "dataset.train=32",
    "dataset.val=5", "dataset.test=5", "dataset.batch_size=4", "trainer.max_steps=12",
    "trainer.checkpoint_every=4", "trainer.keep_last=100",
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "mixed"])
def test_a_resumed_run_equals_the_undisturbed_one(
    start_run: StartRun, tmp_path: Path, dtype: str
) -> None:
    """Twelve steps are an epoch of eight and four more; the cut is in the first one."""
    options = [*TINY, f"dtype={dtype}"]
    done = start_run(tmp_path / "whole", *options)
    assert (done.status, done.metric) == ("finished", "map_50")
    resumed = cut(tmp_path / "whole", tmp_path / "resumed")
    start_run(resumed, *options, "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)
