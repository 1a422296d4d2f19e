"""The command line as a whole: few commands, few options, fields by name, quick help."""

import inspect
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from ospruner.cli import app, commands
from ospruner.cli.fields import Fields, LazyGroup, fields_of, with_fields
from ospruner.doctor.examination import Diagnosis, Finding
from ospruner.progress import PhaseBars

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


FIELDS = Fields(f"{__name__}:Settings", shown=("price", "limit", "urls", "quick"), hidden=("out",))
made_up = typer.Typer(cls=LazyGroup, add_completion=False)
seen: dict[str, Any] = {}


@made_up.command("other")
def other() -> None:
    """Makes it a group."""


@made_up.command("run")
@with_fields(FIELDS)
def run_command(
    context: typer.Context, out: Annotated[str, typer.Option(help="Where.")] = "x"
) -> None:
    """Keeps what it is told."""
    seen.clear()
    seen.update(fields_of(context, FIELDS, out=out))


def told(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Fields, "load", lambda self: Settings)
    return CliRunner().invoke(made_up, ["run", *arguments], env={"COLUMNS": "200"})


def test_options_go_before_set_and_set_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("price: 1e-5\nlimit: 3\nurls: [a, b]\nschedule: [0.1, 0]\n")
    arguments = ("--config", str(file), "--set", "limit=4", "--set", "quick=true", "--limit", "5")
    done = told(*arguments, monkeypatch=monkeypatch)
    assert done.exit_code == 0, done.output
    assert seen == {
        "price": 1e-5,
        "limit": 5,
        "urls": ("a", "b"),
        "quick": True,
        "schedule": [0.1, 0],
        "out": "x",
    }
    told("--urls", "c", "--quick", "--set", "schedule=r1", monkeypatch=monkeypatch)
    assert seen == {"urls": ("c",), "quick": True, "schedule": "r1", "out": "x"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "limits=4"), "Settings has no field 'limits'. Did you mean limit?"),
        (("--set", "limit"), "--set 'limit' is no field=value"),
        (("--set", "price=cheap"), "price is 'cheap'; it must be a number"),
        (("--set", "out=y"), "out is said by an argument of this command"),
        (("--config", "gone.yaml"), "--config gone.yaml cannot be read"),
    ],
)
def test_what_no_field_takes_is_refused_by_name(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = told(*arguments, monkeypatch=monkeypatch)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


def test_help_shows_fields_with_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = told("--help", monkeypatch=monkeypatch).output
    assert "Price of a token." in shown
    assert "0.0001" in shown
    assert "--schedule" not in shown


def test_there_are_few_commands_and_options() -> None:
    found = whole_commands(app)
    assert len(found) <= 20
    options = {
        name: [one for one in command.params if one.param_type_name == "option"]
        for name, command in found.items()
    }
    assert sum(map(len, options.values())) <= 120
    for name, given in options.items():
        assert len(given) <= 19, name
        assert all(one.help for one in given), name
        assert inspect.cleandoc(found[name].help or "").endswith("."), name


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
    with PhaseBars(console, "label") as bars:
        for done in (0, 4, 8, 8):
            bars("sample", done, 8, "note" * (done == 8))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines == ["label: sample: 0 of 8 traces", "label: sample: 8 of 8 traces note"]
