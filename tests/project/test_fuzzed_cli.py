"""Random arguments for every command: an answer or a refusal by name, never a traceback."""

import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ospruner.cli import app

from ..conftest import Fuzzed
from ..pages import whole_commands

WORDS = [
    *("", " ", "-", "--", "0", "-1", "1e999", "nan", "inf", "NaN", "9" * 40, "null", "true"),
    *("[]", "{}", "a=b", "=", ",", ",,", "a,b", "1,2", "../..", "/dev/null", "/proc/self/mem"),
    *(".", "~", "é\u202e", "\udcff", "\x1b[31m", "[red]", "%s", "{0}", "org/none", "main"),
    *("http://127.0.0.1:1", "x" * 5000),
]
MEANT_FOR_USERS = (ValueError, OSError, FloatingPointError, MemoryError)  # as `main` has them
LONG = {"app", "demo", "doctor", "serve"}  # what they do without any words takes long


def commands() -> dict[str, Any]:
    """Every command by its words."""
    return {name: one for name, one in whole_commands(app).items() if name not in LONG}


def files(folder: Path) -> list[str]:
    """Files that are not what a command takes them for."""
    contents = {
        "empty.jsonl": b"",
        "binary.jsonl": bytes(range(256)),
        "list.json": b"[1, 2]",
        "nan.jsonl": b'{"problem": "a", "answer": NaN}\n',
        "words.txt": b"words\n",
        "config.json": b'{"model_type": "ospruner"}',
        "deep.json": b"[" * 5000 + b"]" * 5000,
        "fake.parquet": b"PAR1PAR1",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [str(folder / name) for name in contents] + [str(folder), str(folder / "absent")]


def arguments(command: Any, drawn: random.Random, words: list[str]) -> list[str]:
    """Some of a command's options, mostly the required ones, with random values."""
    made: list[str] = []
    for option in command.params:
        if option.name == "help" or drawn.random() > (0.95 if option.required else 0.25):
            continue
        if option.param_type_name == "option":
            made.append(drawn.choice([*option.opts, *option.secondary_opts]))
            if option.is_flag:
                continue
        made.append(drawn.choice(words))
    if drawn.random() < 0.1:
        made.insert(drawn.randrange(len(made) + 1), drawn.choice(words))
    return made


@pytest.mark.parametrize("rounds", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_random_arguments_never_end_in_a_traceback(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuzzed: Fuzzed
) -> None:
    monkeypatch.chdir(tmp_path)
    drawn, runner = random.Random(0), CliRunner()
    words = WORDS + 3 * files(tmp_path)
    cases = refused = 0
    wrong: list[str] = []
    for name, command in sorted(commands().items()):
        for _ in range(rounds):
            given = [*name.split(), *arguments(command, drawn, words)]
            result = runner.invoke(app, given)
            cases += 1
            refused += result.exit_code != 0
            error = result.exception
            if error is not None and not isinstance(error, (SystemExit, *MEANT_FOR_USERS)):
                wrong.append(f"{given}: {type(error).__name__}: {error}")
    fuzzed("random command lines", cases=cases, refused=refused, with_a_traceback=len(wrong))
    assert not wrong, "\n".join(wrong)
