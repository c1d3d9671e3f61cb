"""`callbacks.profile.enabled=true`: the trace, the table, and that no number of the run changes."""

import gzip
import json
from pathlib import Path

import pytest
from in_process import StartRun
from sameness import assert_same_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SMALL = ["model=mlp", "model.hidden=8", "dtype=mixed", "trainer.max_steps=12"]
ON = "callbacks.profile.enabled=true"


def test_a_profile_of_three_steps(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    start_run(tmp_path / "plain", *SMALL)
    start_run(tmp_path / "profiled", *SMALL, ON)
    assert_same_run(tmp_path / "plain", tmp_path / "profiled")
    assert not (tmp_path / "plain" / "profile").exists()
    (path,) = (tmp_path / "profiled" / "profile").iterdir()
    assert path.name == "step_00000007.pt.trace.json.gz"
    names = {
        event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    }
    assert {"module: ", "module: hidden1.linear", "module: head"} <= names
    (said,) = (text for text in caplog.messages if text.startswith("profile of steps 7 to 9: "))
    assert said.splitlines()[1].split() == [
        "module",
        "format",
        "ms",
        "a",
        "step",
        "share",
        "backward",
    ]
    assert said.splitlines()[-2].startswith("by format: ")
    assert "float32 to float16" in said.splitlines()[-2]
    assert said.splitlines()[-1] == f"trace: {path}"
    events = EventAccumulator(str(tmp_path / "profiled"))
    events.Reload()
    (text,) = events.Tensors("text/profile")
    assert b"| module | format |" in text.tensor_proto.string_val[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["trainer.max_steps=5"],
            "warning: callbacks.profile.enabled=true: the run ended before step 6",
        ),
        (["trainer.eval_every=8"], "profile of steps 7 to 8: "),  # A validation ends it.
        (["trainer.eval_every=6"], "profile of steps 8 to 10: "),  # Too early: it begins anew.
    ],
)
def test_a_short_run_and_validations_in_between(
    start_run: StartRun,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    options: list[str],
    said: str,
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "precious").write_text("years of work")
    for step in (7, 8):  # A link in a folder that may be foreign is not written through.
        planted = tmp_path / "profile" / f".step_{step:08d}.pt.trace.json.gz"
        planted.parent.mkdir(exist_ok=True)
        planted.symlink_to(tmp_path / "precious")
    start_run(tmp_path, *SMALL, ON, *options)
    assert (tmp_path / "precious").read_text() == "years of work"
    assert sum(text.startswith(said) for text in caplog.messages) == 1
