"""The speech-like experiment and detection: trained in two halves, as if in one."""

from pathlib import Path

import pytest
from in_process import StartRun
from sameness import assert_same_run, cut
from tiny_experiments import chosen

SAVING = [
    "device=cpu",
    "trainer.max_steps=12",
    "trainer.checkpoint_every=4",
    "trainer.keep_last=100",
]
TINY = {
    "speech_lstm_small": [
        "model.hidden=16", "dataset.train=64", "dataset.val=9", "dataset.test=9",
        "dataset.max_labels=3", "dataset.batch_size=8",
    ],
    "detection_ssd_small": [
        "model.width=4", "dataset.train=32", "dataset.val=5", "dataset.test=5",
        "dataset.batch_size=4",
    ],
}  # fmt: skip
METRIC = {"speech_lstm_small": "label_error_rate", "detection_ssd_small": "map_50"}


@pytest.mark.parametrize("dtype", ["fp32", "mixed"])
@pytest.mark.parametrize("experiment", TINY)
def test_a_resumed_run_equals_the_undisturbed_one(
    start_run: StartRun, tmp_path: Path, experiment: str, dtype: str
) -> None:
    """Twelve steps are an epoch of eight and four more; the cut is in the first one."""
    options = [*chosen(experiment), *SAVING, *TINY[experiment], f"dtype={dtype}"]
    done = start_run(tmp_path / "whole", *options)
    assert (done.status, done.metric) == ("finished", METRIC[experiment])
    resumed = cut(tmp_path / "whole", tmp_path / "resumed")
    start_run(resumed, *options, "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)
