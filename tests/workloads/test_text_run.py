"""The text workloads as runs: resumed, evaluated, predicted and exported."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import train
from sameness import assert_same_run
from tiny_experiments import chosen, skip_without_extras

from mpframe import checkpoint
from mpframe.cli.commands.evaluate import evaluate
from mpframe.cli.commands.export import main as export
from mpframe.cli.commands.predict import main as predict
from mpframe.core.errors import DataError, MpframeError
from mpframe.core.tree import tensors_in
from mpframe.tracking.summary import Summary

TINY = {
    "gpt_small": "dataset.context=16 dataset.eval_windows=8 model.width=16 model.depth=1",
    "bert_classifier_small": "dataset.vocab_size=80 dataset.max_tokens=16 dataset.pad_to=16 "
    "model.config.hidden_size=16",
    "bert_spans_small": "model.config.hidden_size=16 dataset.max_tokens=40 dataset.pad_to=40",
}
STEPS = (
    "trainer.max_steps=3 trainer.checkpoint_every=2 trainer.keep_last=9 trainer.log_every=1 "
    "dataset.batch_size=8"
)


@pytest.fixture(scope="module")
def tweets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tweets") / "train.csv"
    words = ("good", "bad", "odd")
    rows = "".join(f"{n},a {words[n % 3]} day,{words[n % 3]},s{n % 3}\n" for n in range(60))
    path.write_text(f"textID,text,selected_text,sentiment\n{rows}")
    return path


def options_of(name: str, dtype: str, roots: dict[str, Path]) -> list[str]:
    options = [*chosen(name), f"dtype={dtype}", *TINY[name].split(), *STEPS.split()]
    return options + [f"dataset.root={root}" for own, root in roots.items() if own == name]


@pytest.fixture(scope="module")
def roots(tiny_data: Path, tweets: Path) -> dict[str, Path]:
    return {"bert_classifier_small": tiny_data / "text_folder", "bert_spans_small": tweets}


@pytest.fixture(scope="module", params=TINY)
def trained(
    request: Any, tmp_path_factory: pytest.TempPathFactory, roots: dict[str, Path]
) -> tuple[str, Path, list[str]]:
    """The name of an experiment, the folder of a run of it in mixed, and the options."""
    skip_without_extras(request.param)
    options = options_of(request.param, "mixed", roots)
    folder = tmp_path_factory.mktemp("run")
    train(folder, *options)
    return request.param, folder, options


def assert_resumes(folder: Path, options: list[str], resumed: Path) -> None:
    shutil.copytree(folder, resumed)
    shutil.rmtree(checkpoint.all_in(resumed)[-1])
    (resumed / "summary.json").unlink()
    train(resumed, *options, "resume=auto")
    assert_same_run(folder, resumed)


def test_a_resumed_run_is_the_same(trained: Any, tmp_path: Path) -> None:
    _, folder, options = trained
    assert_resumes(folder, options, tmp_path / "resumed")


@pytest.mark.parametrize("name", TINY)
def test_in_fp32_too(name: str, roots: dict[str, Path], tmp_path: Path) -> None:
    skip_without_extras(name)
    options = options_of(name, "fp32", roots)
    train(tmp_path / "whole", *options)
    assert_resumes(tmp_path / "whole", options, tmp_path / "resumed")


def test_an_evaluation_is_the_run_s_own(trained: Any) -> None:
    name, folder, _ = trained
    summary, done = Summary.read(folder), evaluate(folder, []).evaluation
    assert done.loss == summary.test_loss
    metric = {"gpt_small": "bits_per_byte", "bert_spans_small": "word_jaccard"}
    assert done.metrics[metric.get(name, "accuracy")] == summary.test_metric


def test_predictions(trained: Any, tmp_path: Path) -> None:
    name, folder, _ = trained
    out = tmp_path / "out.csv"
    words = [f"checkpoint={folder}", f"out={out}", "split=val"]
    predict(words)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = {
        "bert_classifier_small": "class_name",
        "bert_spans_small": "start_logits_39",
        "gpt_small": "output_15_255",
    }
    assert wanted[name] in rows[0]


def test_an_exported_graph_and_its_sidecar(trained: Any, tmp_path: Path) -> None:
    name, folder, _ = trained
    out = tmp_path / "model.pt2"
    export([f"checkpoint={folder}", f"out={out}", "format=torch_export"])
    told = json.loads((tmp_path / "model.pt2.json").read_text())
    inputs = {one["name"]: (one["shape"], one["dtype"]) for one in told["inputs"]}
    assert inputs
    assert all(shape == [None, None] for shape, _ in inputs.values())
    if name != "gpt_small":
        vocab = (folder / "vocab.txt").read_text()
        assert told["preprocessing"]["vocab"] == vocab.rstrip("\n")
    graph = torch.export.load(out).module()
    one = len(inputs) == 1
    for length in (2, 7, 16):  # The runs read texts of 16 or 40 tokens.
        zeros = {key: torch.zeros(3, length, dtype=torch.int64) for key in inputs}
        outputs = graph(*zeros.values()) if one else graph(**zeros)
        assert all(len(tensor) == 3 for tensor in tensors_in(outputs))


@pytest.mark.parametrize("trained", ["bert_classifier_small"], indirect=True)
def test_other_texts_are_not_read_with_other_numbers(trained: Any, tmp_path: Path) -> None:
    _, folder, options = trained
    other = tmp_path / "texts"
    for topic in ("art", "business", "politics", "sport", "tech"):
        (other / topic).mkdir(parents=True)
        for number in range(5):
            (other / topic / f"{number}.txt").write_text(f"quite {topic} x{number}")
    message = (
        rf"the vocabulary of its tokenizer is not the run's, .*dataset.vocab={folder}/vocab.txt$"
    )
    with pytest.raises(DataError, match=message):
        evaluate(folder, [f"dataset.root={other}"])
    given = [f"dataset.root={other}", f"dataset.vocab={folder}/vocab.txt"]
    assert evaluate(folder, given).samples == 2
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    (run / "vocab.txt").write_text("changed")
    with pytest.raises(MpframeError, match=r"the vocabulary of its tokenizer is not the run's"):
        train(run, *options, "trainer.max_steps=4", "resume=auto")
