"""Workloads and batches of a user's own as runs: resumed, evaluated, predicted, exported."""

import json
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import StartRun, assert_same_run, csv_rows, cut, train
from PIL import Image
from tiny_data import tiny

from mpframe.cli.commands import export, predict
from mpframe.cli.commands.evaluate import evaluate
from mpframe.config import CONF
from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.core.errors import DataError, MpframeError
from mpframe.core.tree import tensors_in
from mpframe.run.parts import build_task
from mpframe.run.trainer import build_trainer
from mpframe.tracking.summary import Summary

STEPS = [
    "device=cpu", "dataset.batch_size=8", "trainer.max_steps=3", "trainer.epochs=9",
    "trainer.checkpoint_every=2", "trainer.keep_last=9", "trainer.log_every=1", "dtype=mixed",
]  # fmt: skip
BERT = "model.config.hidden_size=16 dataset.max_tokens=40 dataset.pad_to=40"
OWN = {  # by experiment: its metric and what makes it smaller
    "bikes": ("rmspe", "model.hidden=[8] trainer.eval_every=3"),
    "photographs_unet_small": ("dice", "dataset.crops_per_image=24"),
    "gpt_small": ("bits_per_byte", "model.width=16"),
    "bert_classifier_small": ("accuracy", BERT),
    "bert_spans_small": ("word_jaccard", BERT),
    "speech_lstm_small": ("label_error_rate", "model.hidden=16 dataset.train=16"),
    "detection_ssd_small": ("map_50", ""),
}  # fmt: skip


class Trained:
    def __init__(self, name: str, data: Path, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.options = [*tiny(name, data), *STEPS, *OWN[name][1].split()]
        if name == "bert_spans_small":
            words = ("good", "bad", "odd")
            rows = "".join(f"{n},a {words[n % 3]} day,{words[n % 3]},s{n % 3}\n" for n in range(60))
            (folder / "tweets.csv").write_text(f"textID,text,selected_text,sentiment\n{rows}")
            self.options.append(f"dataset.root={folder}/tweets.csv")
        train(folder, *self.options)


@pytest.fixture(scope="module", params=OWN)
def run(request: Any, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(request.param, tiny_data, tmp_path_factory.mktemp("run"))


def of(*names: str, slow: Iterable[str] = ()) -> Any:
    """The runs of these, and in `./dev all` of more."""
    rows = [*names, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]
    return pytest.mark.parametrize("run", rows, indirect=True)


@of("gpt_small", slow=[name for name in OWN if name != "gpt_small"])
def test_a_resumed_run_and_an_evaluation_equal_the_whole_run(run: Trained, tmp_path: Path) -> None:
    resumed = cut(run.folder, tmp_path / "resumed", 2)
    train(resumed, *run.options, "resume=auto")
    assert_same_run(run.folder, resumed)
    summary = Summary.read(run.folder)
    measured = evaluate(run.folder, [], split="val" if summary.test_metric is None else "test")
    assert summary.metric == OWN[run.name][0]
    own = summary.best if summary.test_metric is None else summary.test_metric
    assert measured.evaluation.metrics[summary.metric] == own


def predicted(run: Trained, out: Path, *words: str) -> list[dict[str, str]]:
    predict.main([f"checkpoint={run.folder}", f"out={out}", *words])
    return csv_rows(out)


@of("bikes")
@pytest.mark.slow
def test_a_prediction_is_in_the_targets_unit(run: Trained, tmp_path: Path) -> None:
    rows = predicted(run, tmp_path / "out.csv", "split=val", "outputs=raw")
    assert set(rows[0]) == {"index", "target", "output"}
    outputs, targets = (torch.tensor([float(r[k]) for r in rows]) for k in ("output", "target"))
    assert targets.min() >= 1  # riders, not their logarithm
    rmspe = ((outputs.double() - targets) / targets).square().mean().sqrt()
    measured = evaluate(run.folder, [], split="val").evaluation.metrics["rmspe"]
    assert rmspe.item() == pytest.approx(measured, rel=1e-6)  # outputs are written as float32


@of("photographs_unet_small", "bert_classifier_small", slow=("bert_spans_small",))
def test_training_samples_are_predicted_in_tiles_and_whole(run: Trained, tmp_path: Path) -> None:
    rows = predicted(run, tmp_path / "out.csv", "split=train")
    if run.name == "photographs_unet_small":
        assert len(rows) == 3 * 4  # A photograph of 40 x 64 in 16 x 16.
        assert "output_0_0_0" in rows[0]  # a logit of each class and pixel
    else:
        assert {"class_name", "start_logits_39"} & set(rows[0])


@of("gpt_small", "bert_classifier_small")
@pytest.mark.slow
def test_an_export_is_the_same_model(run: Trained, tmp_path: Path) -> None:
    out = tmp_path / "model.pt2"
    export.main([f"checkpoint={run.folder}", f"out={out}", "format=torch_export"])
    graph = torch.export.load(out).module()
    told = json.loads((tmp_path / "model.pt2.json").read_text())
    if run.name != "gpt_small":
        vocab = (run.folder / "vocab.txt").read_text()
        assert told["preprocessing"]["vocab"] == vocab.rstrip("\n")
    assert all(one["shape"] == [None, None] for one in told["inputs"])
    for length in (2, 7):  # The runs read texts of 8 or 40 tokens.
        zeros = {one["name"]: torch.zeros(3, length).long() for one in told["inputs"]}
        outputs = graph(*zeros.values()) if len(zeros) == 1 else graph(**zeros)
        assert all(len(tensor) == 3 for tensor in tensors_in(outputs))


@of("bikes", "photographs_unet_small")
def test_other_data_are_not_read_alike(run: Trained, tiny_data: Path, tmp_path: Path) -> None:
    if run.name == "bikes":
        shutil.copytree(tiny_data / "bikes", tmp_path / "bikes")
        (table,) = (tmp_path / "bikes").iterdir()
        table.write_text(table.read_text().replace(".1428571", ".9"))
        with pytest.raises(DataError, match=r"^dataset: continuous, as measured on the training"):
            evaluate(run.folder, [f"dataset.root={tmp_path}/bikes"])
        return
    shutil.copytree(tiny_data / "mask_folder", tmp_path / "dark")
    for path in tmp_path.glob("dark/*/images/*"):
        Image.open(path).point(lambda value: value // 2).save(path)
    dark = f"dataset.root={tmp_path}/dark"
    with pytest.raises(DataError, match=r"^dataset: its images are normalised by") as refused:
        evaluate(run.folder, [dark])
    given = shlex.split(str(refused.value).partition("; give ")[2])
    assert evaluate(run.folder, [dark, *given]).samples > 0


@of("bert_classifier_small")
def test_other_texts_are_not_read_alike(run: Trained, tiny_data: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny_data / "text_folder", tmp_path / "texts")
    for path in other.glob("*/*.txt"):
        path.write_text(path.read_text().replace("more", f"quite x{path.stem}"))
    own = f"dataset.vocab={run.folder}/vocab.txt"
    with pytest.raises(DataError, match=rf"vocabulary of its tokenizer is not the run's, .*{own}$"):
        evaluate(run.folder, [f"dataset.root={other}"])
    assert evaluate(run.folder, [f"dataset.root={other}", own]).samples == 2
    changed = shutil.copytree(run.folder, tmp_path / "run")
    (changed / "vocab.txt").write_text("changed")
    with pytest.raises(MpframeError, match=r"the vocabulary of its tokenizer is not the run's"):
        train(changed, *run.options, "trainer.max_steps=4", "resume=auto")


@pytest.mark.slow
def test_a_ladder_runs_every_rung_and_each_stores_what_it_says() -> None:
    _, composed = compose_named(["experiment=ladder_digits"])
    rungs = sorted(path.stem for path in (CONF / "rung").glob("*.yaml"))
    assert sorted(composed.hydra.sweeper.params.rung.split(",")) == rungs
    single, half = torch.float32, torch.float16
    for rung, conv, norm, kept in (
        *(("fp32", single, single, single), ("half", half, half, half)),
        *(("fp32_norms", half, single, half), ("masters", half, single, single)),
    ):
        words = ["experiment=ladder_digits", "model.width=4", f"rung={rung}"]
        config = check_config(without_hydra(compose_named(words)[1]))
        trainer = build_trainer(config, build_task(config), batches=4)
        stored = dict(trainer.model.named_parameters())
        assert stored["layer1.0.conv1.weight"].dtype == conv
        assert stored["layer1.0.bn1.weight"].dtype == norm
        # A master, if there is one.
        assert trainer.state_dict()["weights"]["layer1.0.conv1.weight"].dtype == kept


OWN_PARTS = ["model=own", "dataset=own", "device=cpu", "dataset.batch_size=8"]
TARGETS = ["model._target_=own_parts.Reader", "dataset._target_=own_parts.texts"]
TEXTS = [*OWN_PARTS, *TARGETS, "trainer.max_steps=12", "trainer.keep_last=100"]


def test_resumed_and_of_objects_a_run_is_the_same(start_run: StartRun, tmp_path: Path) -> None:
    """Twelve steps are an epoch of seven and five more; the cut is in the first one."""
    options = [*TEXTS, "trainer.checkpoint_every=4"]
    whole = start_run(tmp_path / "whole", *options)
    resumed = cut(tmp_path / "whole", tmp_path / "resumed")
    start_run(resumed, *options, "dataset.workers=2", "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)
    objects = start_run(tmp_path / "objects", *options, "+dataset.as_object=true")
    assert (whole.train_loss, whole.val_loss) == (objects.train_loss, objects.val_loss)
