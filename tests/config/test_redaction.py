"""Secrets in values that YAML quotes, escapes or folds: hidden, and the file is YAML still."""

import logging
from pathlib import Path
from typing import Any

import yaml
from fixtures import Patch
from omegaconf import OmegaConf

from mpframe.config.redaction import Redacting, as_yaml, hide, redact, secrets_of
from mpframe.files.text import printable

SECRETS = [
    *("plain12345", 'it\'s "quoted" twice', "back\\slash\\s and \\n", "two\nlines\tand a tab"),
    *("{braces: [brackets]}, commas", "*alias &anchor !tag #comment", "ends in a colon:"),
    *("word after word " * 20 + "so that it is folded", "ünïcödé ✓ 12345", "8823746511"),
]


def test_a_secret_is_hidden_however_it_is_escaped_and_yaml_is_yaml_still() -> None:
    def tree(shown: str) -> dict[str, Any]:
        nested = {"within": f"a {shown} b", "listed": [shown, {"deep": shown}]}
        return {"alone": shown, **nested, shown: "a key", "kept": "value", "number": 3}

    for secret in SECRETS:
        config = OmegaConf.create(tree(secret))
        for text in (as_yaml(config, [secret]), as_yaml(config, [secret], resolve=True)):
            assert yaml.safe_load(text) == tree("***")
        quoted = secret.replace("'", "\\'")
        for text in (secret, repr(secret), f"+model.note='{quoted}'", repr(quoted)):
            assert hide(f"before {text} after", [secret]).count("***") == 1
            assert secret not in hide(text, [secret])


def test_a_reference_stays_and_what_it_was_handed_on_to_is_hidden(monkeypatch: Patch) -> None:
    monkeypatch.setenv("PLAIN", "plain12345")
    config = OmegaConf.create({"a": "${oc.env:PLAIN}", "b": "${a}", "c": ["${oc.env:PLAIN}", 1]})
    secrets = secrets_of(["${oc.env:PLAIN}"], {"PLAIN": "plain12345"})
    kept = "\\${oc.env:PLAIN}"
    resolved = yaml.safe_load(as_yaml(config, secrets, resolve=True))
    assert resolved == {"a": kept, "b": "***", "c": [kept, 1]}
    assert yaml.safe_load(as_yaml(config, secrets))["b"] == "${a}"


def test_the_path_of_a_folder_is_no_secret_unless_its_name_says_so(tmp_path: Path) -> None:
    scratch = str(tmp_path)
    named = {"SCRATCH": scratch, "GONE": f"{scratch}/gone", "AUTH_FOLDER": f"{scratch}/auth"}
    (tmp_path / "auth").mkdir()
    secrets = secrets_of([f"${{oc.env:{name}}}" for name in named], named)
    assert set(secrets) == {named["GONE"], named["AUTH_FOLDER"]}


def test_a_number_an_interpolation_that_holds_or_a_part_of_a_secret_is_hidden() -> None:
    shown = redact({"a": 8823746511, "b": 88, "c": True}, ["8823746511"])
    assert shown == {"a": "***", "b": 88, "c": True}
    named = {"A_TOKEN": "plain12345", "B_TOKEN": "plain12345-and-more", "C_TOKEN": "in12345-and"}
    assert hide("a plain12345-and-more b", secrets_of([], named)) == "a *** b"
    config = OmegaConf.create({"a": "${oc.env:NOPE,plain12345}", "b": "${a}"})
    assert yaml.safe_load(as_yaml(config, ["plain12345"])) == {"a": "***", "b": "${a}"}


def test_a_log_line_holds_no_secret_and_steers_no_terminal() -> None:
    said = {"msg": "\x1b[2Jsaid %s\n\tand \x9b more", "args": ("plain12345",)}
    line = Redacting(None, ["plain12345"]).format(logging.makeLogRecord(said))
    assert line == "\\x1b[2Jsaid ***\n\tand \\x9b more"
    shown = printable("\x1b[31mred\x07 \x9b2J \u202e back \ud800 \x00 and\nmore, é ✓")
    assert shown == "\\x1b[31mred\\x07 \\x9b2J \\u202e back \\ud800 \\x00 and\\nmore, é ✓"
    assert printable(shown) == shown
    assert printable("a\nb\tc\rd", keep="\n\t") == "a\nb\tc\\rd"
