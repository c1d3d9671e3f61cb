"""What becomes of a command line before Hydra sees it."""

import shutil
from pathlib import Path

import pytest

from mpframe.config.command_line import prepare
from mpframe.config.locations import CONF
from mpframe.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (["dtype=mixed", "seed=3"], ["dtype=mixed", "seed=3"]),
        (["ops.allow+=[softmax]"], ["++ops.move.softmax=allow"]),
        (["ops.allow+=softmax"], ["++ops.move.softmax=allow"]),
        (["ops.deny-=[exp,log]"], ["++ops.move.exp=none", "++ops.move.log=none"]),
        (["model._target_=my.Net"], ["model=own", "++model._target_=my.Net"]),
        (
            ["model._target_=my.Net", "model.width=3", "seed=1"],
            ["model=own", "++model._target_=my.Net", "++model.width=3", "seed=1"],
        ),
        (["ops.modules={head:fp32}"], ["++ops.modules={head:fp32}"]),
        (["seed=1", "-m", "dtype=fp32,amp"], ["-m", "seed=1", "dtype=fp32,amp"]),
        (["-m", "dtype=fp32,amp", "seed=1,2"], ["-m", "dtype=fp32,amp", "seed=1,2"]),
        (
            ["-m", "loss_scaling=Backoff,LogMax", "loss_scaling.init_scale=1024"],
            ["-m", "loss_scaling=Backoff,LogMax", "++loss_scaling.init_scale=1024"],
        ),
        (["-m", "dtype=glob(*bf16)"], ["-m", "dtype=glob(*bf16)"]),
        (["-m", "seed=range(1,4)"], ["-m", "seed=range(1,4)"]),
        (["-m", "seed=choice(1,2)"], ["-m", "seed=choice(1,2)"]),
        (["--help"], ["--help"]),
        (["-h", "model=mlp"], ["model=mlp", "-h"]),
        (["--shell-completion", "query=bash"], ["--shell-completion", "query=bash"]),
    ],
)
def test_what_hydra_sees(given: list[str], seen: list[str]) -> None:
    assert prepare(given) == seen


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """A folder of a user's own with a primary configuration and a choice of `dtype`."""
    (tmp_path / "mine.yaml").write_text("defaults:\n  - config\n  - _self_\nseed: 3\n")
    (tmp_path / "dtype").mkdir()
    shutil.copy(CONF / "dtype" / "amp.yaml", tmp_path / "dtype" / "special.yaml")
    return tmp_path


def test_a_folder_of_ones_own_is_checked_too(own_folder: Path) -> None:
    flags = [f"--config-dir={own_folder}", "--config-name=mine"]
    assert prepare([*flags, "dtype=special"]) == [*flags, "dtype=special"]
    assert prepare([flags[0], "-m", "dtype=glob(s*)"]) == [flags[0], "-m", "dtype=glob(s*)"]
    with pytest.raises(ConfigError, match=r"^dtype=glob\(x\*\): matches no choice; .* special$"):
        prepare([flags[0], "-m", "dtype=glob(x*)"])
    with pytest.raises(ConfigError, match=r"^dtype=speciak: choose .*; nearest: special$"):
        prepare([*flags, "dtype=speciak"])
    with pytest.raises(ConfigError, match=r"^trainer.max_stepz: no such option; nearest: trainer."):
        prepare([*flags, "trainer.max_stepz=3"])


def test_a_package_of_configurations_is_hydras_business() -> None:
    words = ["--config-path=pkg://elsewhere", "model=theirs"]
    assert prepare(words) == words


def test_every_job_of_a_sweep_is_checked() -> None:
    """An option that only some of the scalers take is refused before the first job starts."""
    with pytest.raises(ConfigError, match=r"loss_scaling\.growth_interval: no such option"):
        prepare(["-m", "loss_scaling=Backoff,LogMax", "loss_scaling.growth_interval=5"])


def test_an_argument_of_ones_own_class_may_be_added() -> None:
    assert prepare(["+model.depth=3"]) == ["+model.depth=3"]


MODES = "choose amp, amp_bf16, fp32, mixed, mixed_bf16"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("fp16", "float16", "half", "FP16"), "dtype=mixed or dtype=amp"),
        (("bf16", "bfloat16"), "dtype=mixed_bf16 or dtype=amp_bf16"),
        (("16-mixed", "O1"), "dtype=amp"),
        (("bf16-mixed",), "dtype=amp_bf16"),
        (("O2",), "dtype=mixed"),
        (("fp8",), "dtype=amp or dtype=amp_bf16, formats of 8 bits are not there"),
    ],
)
def test_another_librarys_name_of_a_mode_is_answered_with_ours(
    names: tuple[str, ...], words: str
) -> None:
    for name in names:
        for arguments in ([f"dtype={name}"], ["-m", f"dtype=fp32,{name}"]):
            with pytest.raises(ConfigError) as error:
                prepare(arguments)
            assert str(error.value) == f"dtype={name}: {MODES}; use {words}"


@pytest.mark.parametrize("sign", ["+", "++"])
def test_a_choice_with_a_plus_is_answered_with_the_word_to_write(sign: str) -> None:
    with pytest.raises(ConfigError) as error:
        prepare([f"{sign}experiment=digits_mlp"])
    assert str(error.value) == (
        f"{sign}experiment=digits_mlp: a choice takes no +; write experiment=digits_mlp"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["hydra.run.dir="], "hydra.run.dir=: is empty, perhaps from a shell variable that is not"),
        (["hydra.run.dir='  '"], "hydra.run.dir=: is empty"),
        (["-m", "hydra.sweep.dir=", "seed=1,2"], "hydra.sweep.dir=: is empty"),
        (
            ["-m", "seed=range(1,1)"],
            r"seed=range\(1,1\): holds no value, so the sweep would",
        ),
        (["--experimental-rerun=x.pickle"], "--experimental-rerun=x.pickle: reads a pickle, which"),
        (["--experimental-rer=x.pickle"], "--experimental-rerun=x.pickle: reads a pickle, which"),
    ],
)
def test_what_would_harm_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        prepare(words)
