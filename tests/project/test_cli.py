"""The command line and the public API: few names, quick help, and never a traceback.

What no field takes is refused by name: bad_inputs.txt.
"""

import inspect
import io
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

import ospruner
from ospruner.cli import app, commands
from ospruner.cli.fields import Fields, LazyGroup, with_fields
from ospruner.doctor.examination import Diagnosis, Finding
from ospruner.progress import PhaseBars

from ..conftest import Fuzzed
from ..own_process import output_of
from ..pages import whole_commands


@dataclass
class Settings:
    """Of a made-up command."""

    price: float = field(default=1e-4, metadata={"help": "Price of a token."})
    limit: int | None = field(default=None, metadata={"help": "Only the first N."})
    urls: tuple[str, ...] = field(default=(), metadata={"help": "Servers."})
    quick: bool = field(default=False, metadata={"help": "Hurry."})
    schedule: str | list[float] = field(default="auto", metadata={"help": "Prices."})
    out: str = ""


FIELDS = Fields(f"{__name__}:Settings", shown="price limit urls quick", hidden="out")
made_up = typer.Typer(cls=LazyGroup, add_completion=False)
seen: dict[str, Any] = {}


@made_up.command("other")
def other() -> None:
    """Makes it a group."""


@made_up.command("run")
@with_fields(FIELDS)
def run_command(out: Annotated[str, typer.Option(help="Where.")] = "x", **said: Any) -> None:
    """Keeps what it is told."""
    seen.clear()
    seen.update(said, out=out)


def told(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Fields, "load", lambda self: Settings)
    return CliRunner().invoke(made_up, ["run", *arguments], env={"COLUMNS": "200"})


def test_options_then_set_then_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("price: 1e-5\nlimit: 3\nurls: [a, b]\nschedule: [0.1, 0]\n")
    arguments = ("--config", str(file), "--set", "limit=4", "--set", "quick=true", "--limit", "5")
    done = told(*arguments, monkeypatch=monkeypatch)
    assert done.exit_code == 0, done.output
    said = {"price": 1e-5, "limit": 5, "urls": ("a", "b"), "quick": True, "schedule": [0.1, 0]}
    assert seen == {**said, "out": "x"}
    told("--urls", "c", "--quick", "--set", "schedule=r1", monkeypatch=monkeypatch)
    assert seen == {"urls": ("c",), "quick": True, "schedule": "r1", "out": "x"}


def test_help_shows_fields_with_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = told("--help", monkeypatch=monkeypatch).output
    (price,) = (line for line in shown.splitlines() if "Price of a token." in line)
    assert "0.0001" in price
    assert "--schedule" not in shown


def test_there_are_few_commands_and_options() -> None:
    found = whole_commands(app)
    assert len(found) <= 20
    count = 0
    for name, command in found.items():
        options = [one for one in command.params if one.param_type_name == "option"]
        count += len(options)
        assert len(options) <= 19, name
        assert all(one.help for one in options), name
        assert inspect.cleandoc(command.help or "").endswith("."), name
    assert count <= 120


def test_brackets_in_paths_and_names_are_printed_as_they_are() -> None:
    """`[v2]` is no markup, in lines, tables, bars, findings and notes."""
    name = "runs/[v2]/[bold]x[/bold]"
    table = Table(title=name)
    table.add_row(name)
    report = Diagnosis(name, sections={name: [Finding(name, name, "wrong", name)]})
    console = commands.console
    with console.capture() as written:
        console.print(f"Policy: {name}", table, soft_wrap=True)
        report.show(console)
        bars = PhaseBars(console, name)
        bars("train", 1, 2, name)
        console.print(bars.get_renderable(), soft_wrap=True)
    assert written.get().count("[v2]") >= 8
    assert "[bold]x[/bold]" in written.get()


def test_into_a_pipe_phases_are_lines() -> None:
    console = Console(file=io.StringIO(), width=80)
    with PhaseBars(console, "label") as bars, console.capture() as written:
        for done in (0, 4, 8, 8):
            bars("sample", done, 8, "note" * (done == 8))
    lines = written.get().splitlines()
    assert lines == ["label: sample: 0 of 8 traces", "label: sample: 8 of 8 traces note"]


WORDS = [
    *("", " ", "-", "--", "0", "-1", "1e999", "nan", "inf", "NaN", "9" * 40, "null", "true"),
    *("[]", "{}", "a=b", "=", ",", ",,", "a,b", "1,2", "../..", "/dev/null", "/proc/self/mem"),
    *(".", "~", "é\u202e", "\udcff", "\x1b[31m", "[red]", "%s", "{0}", "org/none", "main"),
    *("http://127.0.0.1:1", "x" * 5000),
]
MEANT_FOR_USERS = (ValueError, OSError, FloatingPointError, MemoryError)  # as `main` has them
LONG = {"app", "demo", "doctor", "serve"}  # what they do without any words takes long


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
    cases, wrong = 0, list[str]()
    for name, command in sorted(whole_commands(app).items()):
        for _ in range(0 if name in LONG else rounds):
            given = [*name.split(), *arguments(command, drawn, words)]
            error, cases = runner.invoke(app, given).exception, cases + 1
            if error is not None and not isinstance(error, (SystemExit, *MEANT_FOR_USERS)):
                wrong.append(f"{given}: {type(error).__name__}: {error}")
    fuzzed("random command lines", cases=cases, with_a_traceback=len(wrong))
    assert not wrong, "\n".join(wrong)


LIGHT = """
import contextlib, io, sys
import ospruner, ospruner.demo
assert ospruner.demo.REASONER.joinpath("config.json").is_file()
heavy = {"torch", "transformers", "datasets", "numpy", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
import ospruner.durable, ospruner.optional, ospruner.provenance, ospruner.cli
import ospruner.train, ospruner.eval
for flag, words in (("--help", "label"), ("--version", "0.1.0")):
    sys.argv[1:] = [flag]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        ospruner.cli.main()
    assert words in said.getvalue()
assert not {"torch", "transformers", "datasets"} & set(sys.modules)
"""


def test_importing_is_light() -> None:
    """A package's `__init__` loads nothing, nor do `ospruner --help` and `--version`."""
    output_of(sys.executable, "-c", LIGHT)


def test_there_are_few_and_they_are_typed(repo_dir: Path) -> None:
    assert dir(ospruner) == ospruner.__all__
    assert len(dir(ospruner)) <= 12
    text = (repo_dir / "ospruner" / "__init__.py").read_text("utf-8")
    typed = text[text.index("if TYPE_CHECKING") : text.index("__all__")]
    for name in ospruner.__all__:
        assert re.search(rf"\b{name}\b", typed), name
        said = getattr(ospruner, name).__doc__ or ""
        assert re.search(r"ospruner\.|\.from_pretrained\(|stop_policy=", said), f"{name}: its use"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ospruner.nothing
