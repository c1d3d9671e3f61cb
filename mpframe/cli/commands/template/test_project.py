"""A few steps of the project: `pytest` runs them. A notebook would train the same way."""

from pathlib import Path

from hydra import compose, initialize_config_dir

from mpframe import train

HERE = Path(__file__).parent


def test_a_few_steps(tmp_path: Path) -> None:
    with initialize_config_dir(str(HERE / "conf"), version_base="1.3"):
        config = compose("project", ["trainer.max_steps=4"])
    summary = train(config, tmp_path / "run")
    assert (summary.status, summary.steps) == ("finished", 4)
