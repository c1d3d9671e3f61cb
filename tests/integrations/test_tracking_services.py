"""Runs logged to the real wandb (offline), MLflow (SQLite) and Aim (a local repository)."""

import json
import struct
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures import Patch, refused
from in_process import MEASURED, cut, differing, events, results, scalars, train

from mpframe.core.errors import ConfigError, UserCodeError
from mpframe.integrations.aim import Aim
from mpframe.integrations.mlflow import MLflow
from mpframe.integrations.wandb import Wandb
from mpframe.run.resume import compare
from mpframe.tracking.logger import Loggers
from mpframe.tracking.tracker import Tracker

pytestmark = pytest.mark.filterwarnings("ignore")  # what the packages warn of
SMALL = ("model=mlp", "model.hidden=8", "dataset.batch_size=256", "trainer.log_every=1")
SMALL += ("trainer.epochs=2", "trainer.checkpoint_every=2", "trainer.keep_last=9")
RANGES = "callbacks.ranges.every=5"
SECRET = "abcdefghijkl"


def wandb_words(place: Path) -> list[str]:
    return ["callbacks.wandb.mode=offline", "+callbacks.wandb.init.settings.x_disable_stats=true"]


def mlflow_words(place: Path) -> list[str]:
    return [f"callbacks.mlflow.tracking_uri=sqlite:///{place}/mlflow.db"]


def aim_words(place: Path) -> list[str]:
    return [f"callbacks.aim.repo={place}", "+callbacks.aim.init.system_tracking_interval=null"]


def wandb_records(folder: Path) -> list[Any]:
    """The records of wandb's newest file: chunks of a head and data, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    path = max(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    data, place, whole, records = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            records.append(Record.FromString(whole))
            whole = b""
    return records


def read_wandb(folder: Path, place: Path) -> dict[str, Any]:
    curves, kinds, options, status, run = defaultdict(list), {}, {}, "", None
    for record in wandb_records(folder):
        run = record.run if record.HasField("run") else run
        for item in record.history.item:
            key, *part = item.nested_key or [item.key]
            value = json.loads(item.value_json)
            if part or isinstance(value, dict):
                kinds[key] = ""
            elif not key.startswith("_"):
                curves[key].append((record.history.step.num, value))
        for item in [*record.config.update, *record.run.config.update]:
            options["".join(item.nested_key) or item.key] = json.loads(item.value_json)
        if record.HasField("exit"):
            status = "failed" if record.exit.exit_code else "finished"
    assert run is not None
    names = run.display_name, run.project
    return {"curves": curves, "kinds": kinds, "options": options, "status": status, "names": names}


def read_mlflow(folder: Path, place: Path) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{place}/mlflow.db")
    experiment = client.get_experiment_by_name("mpframe")
    (run,) = client.search_runs([experiment.experiment_id])
    name = run.info.run_id
    curves = {tag: client.get_metric_history(name, tag) for tag in run.data.metrics}
    files, folders = [], [""]
    while folders:
        for entry in client.list_artifacts(name, folders.pop() or None):
            (folders if entry.is_dir else files).append(entry.path)
    return {
        "curves": {tag: [(p.step, p.value) for p in points] for tag, points in curves.items()},
        "kinds": {
            path.removesuffix(".md").rpartition("/step_")[0] or path[:-3]: "" for path in files
        },
        "options": {**run.data.params, "seed": int(run.data.params["seed"])},
        "status": run.info.status.lower(),
        "names": (run.info.run_name, experiment.name),
    }


def aim_run(place: Path) -> Any:
    import aim
    from aim.sdk.index_manager import RepoIndexManager

    repo, (path,) = aim.Repo.from_path(str(place)), place.glob(".aim/meta/chunks/*")
    RepoIndexManager.get_index_manager(repo).index(path.name)  # As Aim's server does.
    return aim.Run(path.name, repo=repo, read_only=True)


def read_aim(folder: Path, place: Path) -> dict[str, Any]:
    run = aim_run(place)
    tables = {metric.name: metric.dataframe() for metric in run.metrics()}
    found = run.collect_sequence_info(("images", "distributions", "texts"))
    kinds = {entry["name"]: kind for kind, entries in found.items() for entry in entries}
    return {
        "curves": {tag: sorted(zip(t.step, t.value, strict=True)) for tag, t in tables.items()},
        "kinds": kinds, "options": run["hparams"], "status": run["status"],
        "names": (run.name, run.experiment),
    }  # fmt: skip


SERVICES = {
    "wandb": (wandb_words, read_wandb),
    "mlflow": (mlflow_words, read_mlflow),
    "aim": (aim_words, read_aim),
}


def same_curves(found: dict[str, Any], folder: Path, above: int = 0) -> None:
    """The service has the points of TensorBoard above a step, each once, and equal values."""
    wanted = scalars(folder)
    assert found.keys() == wanted.keys()
    for tag, points in wanted.items():
        kept = [(step, value) for step, value in found[tag] if step > above]
        assert [step for step, _ in kept] == [step for step, _ in points if step > above], tag
        if tag not in MEASURED:
            assert kept == [(s, pytest.approx(v)) for s, v in points if s > above], tag


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVICES)
def test_a_service_gets_what_tensorboard_gets_and_a_resumed_run_goes_on_there(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)  # MLflow's pictures go below it.
    monkeypatch.setenv("MY_TOKEN", SECRET)
    monkeypatch.setattr(sys, "argv", ["train.py", f"model.name={SECRET}"])
    (place := tmp_path / "service").mkdir()
    words, read = SERVICES[name]
    given = [*SMALL, RANGES, f"callbacks=[default,{name}]", *words(place), f"run_name={SECRET}"]
    whole = tmp_path / "runs" / "whole"
    train(whole, *given)
    found, shown = read(whole, place), events(whole).Tags()
    same_curves(found["curves"], whole)
    assert (found["status"], found["names"]) == ("finished", ("runs/whole", "mpframe"))
    assert (found["options"]["dtype"], found["options"]["seed"]) == ("mixed float16", 0)
    kinds = ["images"] if name == "mlflow" else ["images", "histograms"]
    tags = {tag for kind in kinds for tag in shown[kind]}
    assert {*found["kinds"]} == tags | {tag for tag in shown["tensors"] if tag[:5] == "text/"}
    train(tmp_path / "plain", *SMALL, RANGES, f"run_name={SECRET}")
    plain, logged = (results(folder)["state"] for folder in (tmp_path / "plain", whole))
    assert [path for path in differing(plain, logged) if "callbacks/aim" not in path] == []
    killed = cut(whole, tmp_path / "runs" / "killed", at=4)
    breaks = ["+callbacks.fail._target_=own_parts.Breaks", "+callbacks.fail.step=7"]
    with pytest.raises(UserCodeError, match="no route"):
        train(killed, *given, "resume=auto", *breaks)
    assert read(killed, place)["status"] == "failed"
    train(killed, *given, "resume=auto")
    again = read(killed, place)
    assert again["status"] == "finished"
    same_curves(again["curves"], killed, 6 if name == "wandb" else 0)
    files = [path for path in [*place.rglob("*"), *killed.rglob("wandb/**/*")] if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


class Steps:
    """A wandb whose server already has the steps up to 6."""

    def __init__(self) -> None:
        self.step, self.got = 7, list[Any]()
        self.given: dict[str, Any] = {}
        self.config = SimpleNamespace(update=lambda values, allow_val_change: None)

    def init(self, **given: Any) -> "Steps":
        self.given = given
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.step = step
        self.got.append((step, values))


def test_wandb_is_sent_no_step_twice_and_never_an_earlier_one(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    service, api = Wandb(init={"group": "g", "settings": {"console": "wrap"}}), Steps()
    service.api = api
    run: Any = SimpleNamespace(
        folder=tmp_path / "a" / "b", identity="i", tracker=Loggers(Tracker(tmp_path))
    )
    trainer: Any = SimpleNamespace(progress=SimpleNamespace(global_step=4))
    service.setup(trainer, run)
    for step in (4, 5, 6, 7, 8):  # The validation of step 4 was interrupted.
        service.scalars(step, {"a": step})
    service.scalars(7, {"picture": 7})
    assert api.got == [(7, {"a": 4}), (7, {"a": 7}), (8, {"a": 8}), (8, {"picture": 7})]
    wanted = {"id": "i", "name": "a/b", "resume": "allow", "group": "g"}
    assert wanted.items() <= api.given.items()
    assert api.given["settings"] == {"console": "wrap", "x_disable_meta": True}


@pytest.mark.parametrize("kind", [Wandb, MLflow, Aim])
def test_what_is_refused(kind: Any, monkeypatch: Patch) -> None:
    name = kind.package
    said = refused(ConfigError, kind, on_error="go on")
    assert said == f"callbacks.{name}.on_error=go on: must be one of warn, stop"
    monkeypatch.setitem(sys.modules, name, None)
    said = refused(ConfigError, kind)
    assert (
        said
        == f"callbacks.{name}: {name} is not installed; get it with pip install mpframe[{name}]"
    )


def test_a_service_that_does_not_open_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    uri = "callbacks.mlflow.tracking_uri=nowhere://x"
    with pytest.raises(UserCodeError, match=r"^callbacks\.mlflow: MLflow raised UnsupportedModel"):
        train(tmp_path, *SMALL, "callbacks=mlflow", uri)


def test_a_logger_that_is_added_later_changes_no_number() -> None:
    for name in (*SERVICES, "jsonl"):
        more = {"csv": {"log_every": 1}, name: {"_target_": "a.B", "project": "mine"}}
        assert compare({"callbacks": {"csv": {"log_every": 1}}}, {"callbacks": more}) == ([], [])


def test_aim_draws_bins_of_any_width_and_begins_a_run_that_is_gone(tmp_path: Path) -> None:
    aim = pytest.importorskip("aim")
    service = Aim(repo=str(tmp_path), init={"system_tracking_interval": None})
    service.load_state_dict({"hash": "gone"})
    run: Any = SimpleNamespace(folder=tmp_path, tracker=Loggers(Tracker(tmp_path / "board")))
    service.setup(SimpleNamespace(progress=SimpleNamespace(global_step=1)), run)  # type: ignore[arg-type]
    service.histogram("h", [2.0, 4.0], [0.0, 1.0, 4.0], 1)
    service.close()
    sequence = aim_run(tmp_path).get_distribution_sequence("h", aim.sdk.run.Context({}))
    (shown,) = sequence.values.values_list()
    assert (shown.weights.tolist(), shown.range) == (pytest.approx([10 / 3, 8 / 3]), [0.0, 4.0])
