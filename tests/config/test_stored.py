"""A stored configuration is data: which targets it may name, and what trusts them."""

from pathlib import Path

import pytest
import yaml
from fixtures import Patch, refused
from omegaconf import OmegaConf

from mpframe.config.command_line import compose_named, without_hydra
from mpframe.config.overrides import take_source
from mpframe.config.stored import Trusted, config_of
from mpframe.core.errors import CheckpointError, ConfigError

FILES = {
    "model/net.yaml": "_target_: my_net.Net\nwidth: 8\ninner: {_target_: my_net.Inner}\n",
    "dataset/points.yaml": "_target_: my_data.points\nbatch_size: 16\n",
    "experiment/points.yaml": "# @package _global_\n"
    "metrics: {top: {_target_: my_metric.Top, k: 5}}\n",
}
OWN = ["model._target_=my_net.Net", "dataset._target_=my_data.points"]
METRIC = "metrics.top._target_=my_metric.Top"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder `conf` of a user's own, within the current one."""
    for name, text in FILES.items():
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def stored() -> str:
    """What a run of those files stores."""
    _, composed = compose_named([*OWN, "model.width=8", f"+{METRIC}", "+metrics.top.k=5"])
    return OmegaConf.to_yaml(without_hydra(composed), resolve=True)


def test_all_targets_that_need_trust_are_named_in_one_line_for_a_shell(
    folder: Path, stored: str
) -> None:
    said, (dataset, model) = refused(CheckpointError, config_of, stored, folder, []), sorted(OWN)
    assert said == (
        f"{folder}: {dataset} and {model} and {METRIC}: not mpframe's own, and a stored "
        "configuration runs nothing; give the --config-dir whose files name it, or if you trust "
        f"it, add {dataset} {model} +{METRIC}"
    )
    config = config_of(stored, folder, said.rpartition("add ")[2].split())
    assert (config.model["width"], config.metrics["top"]["k"]) == (8, 5)
    # What is added for trust cannot run in a shell.
    text = stored.replace("my_net.Net", "my_net.Net; rm -r ~")
    with pytest.raises(CheckpointError, match=r"add .* 'model\._target_=my_net\.Net; rm -r ~' "):
        config_of(text, folder, [])


def test_a_users_folder_trusts_what_it_names_where_it_names_it(folder: Path, stored: str) -> None:
    config = config_of(stored, folder, ["--config-dir=conf", "model.width=9"])
    assert config.model == {"_target_": "my_net.Net", "width": 9}
    assert config.metrics == {"top": {"_target_": "my_metric.Top", "k": 5}}
    trusted = Trusted(take_source(["--config-dir=conf"])[0])
    assert trusted.names("model", "my_net.Net")
    for place, name in (("dataset", "my_net.Net"), ("model", "my_net.Inner")):
        assert not trusted.names(place, name)
    assert not trusted.names("metrics.other", "my_metric.Top")


def test_stored_workers_fit_the_cores(folder: Path, stored: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    trusted, text = [*OWN, f"+{METRIC}"], stored.replace("workers: 0", "workers: 300")
    assert config_of(text, folder, trusted).data.workers == 2
    assert config_of(text, folder, [*trusted, "dataset.workers=5"]).data.workers == 5


def test_a_checkpoint_does_not_trust_itself(folder: Path, stored: str) -> None:
    """Whatever lies in the folder of the user's, and whatever names are in it."""
    tree = yaml.safe_load(stored)
    tree["metrics"] = {"x/../../download/model": {"_target_": "my_net.Net"}}
    for place in ("download/model", "conf/metrics.x", "conf/runs", "conf"):
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / "config_resolved.yaml").write_text("_target_: my_net.Net\n" + stored)
    trusted = Trusted(take_source(["--config-dir=conf"])[0])
    assert not trusted.names("metrics.x/../../download/model", "my_net.Net")
    (folder / "conf" / "model" / "net.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"model\._target_=my_net\.Net and .* not mpframe's"):
        config_of(yaml.safe_dump(tree), folder, ["--config-dir=conf"])

    (folder / "conf" / "model" / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"conf/model/bad\.yaml: is not YAML; "):
        config_of(stored, folder, ["--config-dir=conf"])
