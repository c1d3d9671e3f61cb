"""A step is that of one large batch, however its samples are cut into micro-batches and ranks.

SGD has a learning rate of 1 in all comparisons, so that a weight moves by its gradient.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from ranked import two_formats
from torch import nn
from torch.nn import functional as F

from mpframe import MasterWeights, Precision, Static
from mpframe.core.comm import SINGLE_PROCESS, is_sharded
from mpframe.core.objective import NamedObjective, StepOutput, samples_in
from mpframe.run.sharding import shard
from mpframe.training.evaluation import Evaluator
from mpframe.training.objectives import model_loss
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer
from mpframe.training.parallel.launch import init_comm
from mpframe.training.plan import Plan
from mpframe.training.trainer import Trainer
from mpframe.training.trainers.multi_objective import MultiObjectiveTrainer

CPU = torch.device("cpu")


class Tagger(nn.Module):
    """A label for each word; the loss is the mean over the labels that are not ignored."""

    def __init__(self, loss_type="ForTokenClassification", both=False) -> None:
        super().__init__()
        self.loss_type, self.config = loss_type, SimpleNamespace(is_encoder_decoder=both)
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 5)
        nn.init.uniform_(self.words.weight, -1, 1)

    def forward(self, input_ids, labels):
        logits = self.head(self.words(input_ids))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def texts(*lengths):
    """Texts of 32 words, of which the first ones have labels."""
    generator = torch.Generator().manual_seed(sum(lengths))
    words = torch.randint(0, 20, (len(lengths), 32), generator=generator)
    padding = torch.arange(32) >= torch.tensor(lengths)[:, None]
    return {"input_ids": words, "labels": (words % 5).masked_fill(padding, -100)}


def joint(*batches):
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def trainer_of(mode, comm=SINGLE_PROCESS, reduce="in_backward", objective=model_loss):
    torch.manual_seed(0)
    model, precision = Tagger(), Precision(mode)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    if reduce == "fsdp":
        shard(model, {"": plain}, precision, comm, CPU)
    _, optimizer = precision.prepare(model, plain)
    scaler = None if mode == "fp32" else Static(2.0**10)
    if scaler:
        scaler.update = lambda amax: setattr(scaler, "amax", amax)
    plan = Plan(reduce="in_backward" if reduce == "fsdp" else reduce)
    options = {"plan": plan, "comm": comm, "evaluator": Evaluator()}
    return Trainer(model, optimizer, objective, precision, scaler, **options)


def weights_of(trainer):
    masters = copy.deepcopy(trainer.weights())
    return {n: own.full_tensor() if is_sharded(own) else own for n, own in masters.items()}


def assert_one_step(mode, step, batch) -> None:
    """The step is that of one process on the whole batch.

    A gradient is a mean of products <= 2. fp32: sums of 9 and of up to 108 of them in two orders,
    below 2 ** 9 u with u = 2 ** -24. Half: four roundings, in both ways: 8 u with u = 2 ** -11.
    """
    trainer, (loss, weights) = trainer_of(mode), step
    result = trainer.train_step(batch)
    bound = 2 * (8 * 2.0**-11 if mode != "fp32" else 2.0**-15)
    assert float(loss) == pytest.approx(float(result.loss), abs=bound)
    for name, expected in weights_of(trainer).items():
        assert torch.allclose(weights[name], expected, rtol=0, atol=bound), name


def bad_mean(model, batch):
    """A mean by hand, whose gradient is nan as well where there is no label."""
    logits, labels = model(**batch)["logits"].flatten(0, 1).float(), batch["labels"].flatten()
    valid = labels != -100
    losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
    return StepOutput((losses * valid).sum() / valid.sum(), count=valid.sum())


@pytest.mark.parametrize(
    ("mode", "objective", "window"),
    [
        *((mode, model_loss, [(1,), (32,)]) for mode in ("fp32", "amp", "mixed")),
        ("fp32", bad_mean, [(0, 0), (1, 2), (32,)]),
        ("mixed", bad_mean, [(1, 2), (0, 0), (32,)]),
        ("amp", bad_mean, [(32,), (1, 2), (0, 0)]),
    ],
)
def test_micro_batches_weigh_as_many_labels_as_they_have(mode, objective, window) -> None:
    """One without labels adds nothing, even if its loss and gradients are nan."""
    trainer, batches = trainer_of(mode, objective=objective), [texts(*own) for own in window]
    result = trainer.train_step(*batches)
    assert int(result.dropped) == 0
    assert_one_step(mode, (result.loss, weights_of(trainer)), joint(*batches))


def stepped(mode, reduce, objective, windows):
    with init_comm(None, lambda: CPU, 120) as comm:
        trainer = trainer_of(mode, comm, reduce, objective)
        result = trainer.train_step(*(texts(*lengths) for lengths in windows[comm.rank]))
        assert not result.skipped
        told = None if mode == "fp32" else trainer.scaler.amax
        assert told is None or torch.isfinite(told)
        return result.loss, weights_of(trainer), told


MANY_AND_FEW = [[1, 2, 3, 1], [2, 1, 1, 7]], [[32, 30, 32], [1, 2, 3]]
NONE_AND_SOME = [[0, 0], [3, 1]], [[32, 2], [7, 9]]


@pytest.mark.parametrize(
    ("window", "reduce", "mode", "objective", "cut"),
    [
        (1, "in_backward", "mixed", model_loss, MANY_AND_FEW),
        (2, "in_backward", "fp32", model_loss, MANY_AND_FEW),
        (2, "after_backward", "amp", model_loss, MANY_AND_FEW),
        (1, "fsdp", "amp", model_loss, MANY_AND_FEW),
        pytest.param(2, "fsdp", "mixed", model_loss, MANY_AND_FEW, marks=two_formats),
        *((1, reduce, "amp", bad_mean, NONE_AND_SOME) for reduce in ("in_backward", "fsdp")),
        *((2, reduce, "amp", bad_mean, NONE_AND_SOME) for reduce in ("after_backward", "fsdp")),
    ],
)
def test_ranks_weigh_as_many_labels_as_they_have(two, mode, objective, reduce, window, cut) -> None:
    """And as many samples: one may have four texts for each three of the other. One without labels
    adds nothing, even if its loss and gradients are nan, and the scaler is told of the others."""
    cut = [own[:window] for own in cut]
    (*first, told), second = two(stepped, mode, reduce, objective, cut)
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    assert first[0] == second[0]
    if objective is bad_mean and window == 1:  # One rank has labels.
        assert torch.equal(told, trainer_of(mode).train_step(texts(*cut[1][0])).amax)
    assert_one_step(mode, first, joint(*(texts(*lengths) for own in cut for lengths in own)))


@pytest.mark.parametrize(("objective", "window"), [(model_loss, 2), (bad_mean, 1)])
def test_a_step_without_labels_is_skipped(objective, window) -> None:
    trainer = trainer_of("mixed", objective=objective)
    before = weights_of(trainer)
    result = trainer.train_step(*[texts(0, 0)] * window)
    assert result.skipped
    assert torch.isnan(result.loss)
    assert all(torch.equal(own, before[name]) for name, own in weights_of(trainer).items())


def test_the_scaler_is_told_the_gradients_as_they_were_computed() -> None:
    """Not weighed: 32 labels beside 1 would make that of a single label 32 times smaller."""
    amax, trainer = trainer_of("mixed").train_step(texts(1)).amax, trainer_of("mixed")
    trainer.train_step(texts(32), texts(1))
    assert torch.equal(trainer.scaler.amax, amax)
    trainer.train_step(texts(0), texts(0))
    assert trainer.scaler.amax == 0


@pytest.mark.parametrize("skip", ["each", "all"])
def test_each_of_several_losses_has_its_own_counts(skip) -> None:
    """The bound of fp32, as above. One loss counts labels, the other one, whose products are
    <= 2 * 8 * 1, texts."""

    def by_text(model, batch):
        hidden = model.words(batch["input_ids"]).sum(2)
        return StepOutput(hidden.square().mean(1).mean())

    def step_on(*batches):
        torch.manual_seed(0)
        model, losses = Tagger(), {"head": model_loss, "words": by_text}
        sgd = {n: torch.optim.SGD(getattr(model, n).parameters(), lr=1.0) for n in losses}
        parts = {name: MasterWeights(own) for name, own in sgd.items()}
        optimizer = MultiOptimizer(parts, skip=skip, own_losses=True)
        trainer = MultiObjectiveTrainer(model, optimizer, losses)
        return trainer.train_step(*batches).loss, *trainer.weights().values()

    few, many = texts(1, 2, 3), texts(32)
    found, (loss, *weights) = step_on(few, many), step_on(joint(few, many))
    torch.testing.assert_close(found[0], loss, rtol=0, atol=2**-10)
    torch.testing.assert_close([*found[1:]], weights, rtol=0, atol=2**-11)


# As GPT-2's, of which transformers does not know the loss by its name.
WordsLMHeadModel = type("WordsLMHeadModel", (Tagger,), {})
LABELS = torch.tensor([[1, 2, -100], [3, 4, 0]])
SHIFTED = {"shift_labels": torch.tensor([[1, -100, 2], [2, 2, 2]])}


@pytest.mark.parametrize(
    ("model", "extra", "count"),
    [
        (Tagger("ForTokenClassification"), {}, 5),
        (Tagger(None), {}, 5),
        (Tagger("ForCausalLM"), {}, 3),
        (Tagger("ForConditionalGeneration"), {}, 3),
        (Tagger("ForConditionalGeneration", both=True), {}, 5),
        (WordsLMHeadModel(None), {}, 3),
        (torch.compile(WordsLMHeadModel(None), backend="eager"), {}, 3),
        (Tagger("ForCausalLM"), SHIFTED, 5),
        (Tagger("ForCTC"), {}, 2),
        (Tagger("ForCausalLM"), {"labels": torch.tensor([0.5, 0.5])}, 2),
        (Tagger("ForSequenceClassification"), {"labels": torch.tensor([0, -100])}, 1),
        (Tagger("ForObjectDetection"), {"labels": [{}, {}]}, 2),
    ],
)
def test_labels_are_counted_as_the_model_averages_them(model, extra, count, monkeypatch) -> None:
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "labels": LABELS, **extra}
    loss = torch.zeros((), requires_grad=True)
    monkeypatch.setattr(Tagger, "forward", lambda *_, **__: {"loss": loss})
    assert NamedObjective("", model_loss)(model, batch).count == count


def test_without_a_count_the_first_tensor_with_samples_counts() -> None:
    weight, inputs = torch.tensor(0.5), torch.zeros(3, 2)
    for batch in ((weight, inputs), {"weight": weight, "inputs": inputs}):
        assert samples_in(batch) == 3
    assert [samples_in(batch) for batch in (weight, [], ())] == [1, 1, 1]


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_an_evaluation_weighs_labels_and_leaves_out_what_has_none(mode) -> None:
    loader = SimpleNamespace(epoch=lambda _: [texts(1), texts(0), texts(32)])
    weighed, whole = trainer_of(mode).evaluate(loader).loss, trainer_of(mode)
    with torch.no_grad(), whole.precision.cast():
        expected = NamedObjective("", model_loss)(whole.model, joint(texts(1), texts(32))).loss
    # The logits are the same; 33 labels are summed in two orders, each loss is below 4.
    assert weighed == pytest.approx(float(expected), abs=4 * 36 * 2**-24)
