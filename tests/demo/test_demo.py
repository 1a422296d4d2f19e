"""A tiny `ospruner demo` for real, and what it leaves behind.

That a killed run goes on is tested where its stages are `make`'s, in tests/train/test_rounds.py.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from modeling_ospruner import OSPrunerConfig
from ospruner.cli import app
from ospruner.demo import demo
from ospruner.demo.demo import PRICES, QUICK, STANDARD, DemoSize, claims, run_demo
from ospruner.eval.methods import EVERY_PRICE, FULL, price_grid
from ospruner.eval.metrics import CHOSEN_BY
from ospruner.eval.results import Results, frame_of, price_name
from ospruner.eval.table import TraceTable
from ospruner.hub_cards.verify import verify
from ospruner.train.labels.loading import load_labels
from ospruner.train.run_folder import record_of
from ospruner.workers import Workers

from ..conftest import MadeOnce
from ..made_results import make_result

TINY = DemoSize("tiny", 120, 80, 40, seeds=1, epochs=24, max_loss=0.2)
RUN = f"""
import sys
from pathlib import Path
from rich.console import Console
from ospruner.demo.demo import DemoSize, run_demo
run_demo(Path(sys.argv[1]), {TINY}, 0, Console(width=80))
"""


@pytest.fixture(scope="module")
def demo_run(made_once: MadeOnce) -> tuple[Path, str]:
    """The folder of a demo, and what it printed."""

    def run(folder: Path) -> None:
        command = [sys.executable, "-c", RUN, str(folder / "demo")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "printed.txt").write_text(done.stdout + done.stderr, "utf-8")

    folder = made_once("demo", run)
    return folder / "demo", (folder / "printed.txt").read_text("utf-8")


def test_nothing_is_labelled_or_trained_again(
    demo_run: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(demo_run[0], tmp_path / "again")
    monkeypatch.setattr(Workers, "run", None)
    found = run_demo(out, TINY, 0, Console(quiet=True))
    assert found.frame.equals(Results.read(demo_run[0] / "report" / "results.json").frame)
    assert record_of(out)["rounds"] == record_of(demo_run[0])["rounds"]


def test_prints_and_writes_what_it_found(demo_run: tuple[Path, str]) -> None:
    (out, printed), size = demo_run, TINY
    said = " ".join(printed.split())
    # A name may be broken over two lines of its column.
    for words in ("accuracy %", "hindsight", "best fixed", "stop_policy=True", "test answers"):
        assert words in printed
    found = Results.read(out / "report" / "results.json")
    rules, config = found.rules, OSPrunerConfig.from_pretrained(out / "policy")
    full = rules.iloc[0]
    assert full["method"] == FULL
    labels = TraceTable.from_dataset(load_labels(out / "labels" / "test").traces)
    wanted = [labels.full_correct.mean(), labels.full_tokens.mean()]
    assert [full["accuracy"], full["tokens"]] == pytest.approx(wanted)
    frontier, known = rules[rules["method"] == EVERY_PRICE], config.prices
    assert known is not None
    assert frontier["parameter"].tolist() == list(price_grid(known))
    assert [known.low, known.high] == PRICES
    (claim,) = found.about["claims"]
    assert claim["holds"], "thinking tokens fall as their price rises"
    assert f"{size.test} test problems are too few to claim more" in said
    # It prunes visibly, at the price that is saved, and says which rule chose it.
    ours = rules.loc[found.chosen]
    assert (ours["method"], ours["parameter"]) == (EVERY_PRICE, config.price)
    assert config.price > 0
    assert f"Its default is price={price_name(config.price)}, chosen as" in said
    card = (out / "policy" / "README.md").read_text()
    for text in (said, card):
        assert CHOSEN_BY in text
    assert ours["reduction"] > 0.15
    assert ours["aes"] > 0
    assert f"it saves {ours['reduction']:.0%} of the thinking tokens" in said
    lost, mended = (size.test * ours[name] for name in ("harmed", "helped"))
    assert f"right answers are kept, {lost:.0f} broken, and {mended:.0f} wrong ones mended" in said
    # Lines of a pipe, as this one is; no warning of a package that nothing uses.
    for method in ("os-pruner", "probe"):
        assert f"{method}, seed 0: train: " in said
    assert "gemm_4bit" not in said
    run = found.about["run"]
    assert (run["seed"], run["settings"]) == (0, vars(size))
    assert run["packages"]["torch"]
    assert {"git_commit", "git_modified", "python", "platform"} <= set(run)
    assert Results.read(out / "policy" / "results.json").to_dict() == found.to_dict()
    assert not (out / "states").exists()

    # The stages of `make`: one round of all problems, its promise, its report and its curve.
    (one,) = record_of(out)["rounds"]
    assert one["problems"] == size.train + size.validation
    assert f"{one['problems']} problems, {one['hours']:.2f} h: saves {one['saved']:.1%}" in said
    assert 0 < one["trained_on"] <= size.train
    (promise,) = config.calibrations or []
    assert (promise["max_loss"], promise["problems"]) == (size.max_loss, size.validation)
    assert promise["tokens_saved"] == one["saved"] > 0
    assert found.about["promise"] == one["promise"]
    assert "(promise)" in printed
    assert f"{100 * size.max_loss:.1f} points" in card
    assert (out / "report" / "report.md").is_file()
    for picture in ("curve.png", "policy/pareto.png", "report/pareto.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")


def test_the_saved_policy_was_used(demo_run: tuple[Path, str]) -> None:
    out, printed = demo_run
    rows = json.loads((out / "side_by_side.json").read_text())["rows"]
    assert len(rows) == 3
    assert len({row["content"] for row in rows}) == 3
    for row in rows:
        off, on = row["off"], row["on"]
        assert off["thinking"].startswith(on["thinking"]), "rows differ before the stop"
        assert "boxed{" in on["answer"]
    assert any(row["on"]["thinking_tokens"] < row["off"]["thinking_tokens"] for row in rows)
    words = re.findall(r"\((?:right|wrong)\)", printed)
    assert len(words) == 6, "told in words, not by colour"
    assert "OS-Pruner demo policy" in (out / "policy" / "README.md").read_text()
    assert all(check.ok for check in verify(str(out / "policy")))


def test_what_is_not_this_run_is_refused(demo_run: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    said = {demo_run[0]: "another run .size: ", tmp_path: "another run's files .thesis"}
    for folder, words in said.items():
        with pytest.raises(ValueError, match=f"holds {words}"):
            run_demo(folder, STANDARD, 0, Console(quiet=True))
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["thesis.txt"]  # beside the lock


def test_the_command_names_size_folder_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("ospruner.demo.demo.run_demo", lambda *said: asked.append(said[:3]))
    sizes = {"": STANDARD, "--quick": QUICK, "--full": demo.FULL}
    for option in sizes:
        assert CliRunner().invoke(app, ["demo", *option.split(), "--seed", "3"]).exit_code == 0
    assert asked == [(Path("runs/demo" + one[1:]), size, 3) for one, size in sizes.items()]


def test_claims_are_of_the_chosen_rows() -> None:
    def held(ours: float, problems: int = 1500) -> dict[str, bool]:
        rows = [
            make_result(FULL, 0.7, 200, problems=problems),
            make_result(EVERY_PRICE, 0.7, 150, 1e-4, "price"),
            make_result(EVERY_PRICE, ours, 100, 1e-3, "price", chosen=True),
            make_result("probe", 0.69, 100, 0.7, "threshold", chosen=True),
            make_result("probe", 0.99, 100, 0.9, "threshold"),
            make_result("best fixed budget", 0.6, 100, 120, "tokens", kind="limit"),
        ]
        results = Results(dataset="d", setting="s", frame=frame_of(rows))
        return {one["claim"]: one["holds"] for one in claims(results, None, 0.02)}

    assert held(0.7) == {
        "thinking tokens fall as their price rises": True,
        "AES above probe": True,
        "AES above best fixed budget": True,
    }
    assert not held(0.65)["AES above probe"]
    assert len(held(0.7, problems=64)) == 1
