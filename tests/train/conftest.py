"""What the training tests share: made-up traces whose tokens show the answer, and runs on them."""

import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from typer.testing import CliRunner

from ospruner.cli import app
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.durable import write_checked
from ospruner.eval.problems.problem import Problem
from ospruner.eval.schema import LabelSettings
from ospruner.formats import DEEPSEEK_R1
from ospruner.provenance import PROVENANCE_FILE
from ospruner.train.config import StopConfig
from ospruner.train.labels.features import FEATURES
from ospruner.train.labels.folder import read_manifest
from ospruner.train.labels.loading import Labels
from ospruner.train.labels.store import LabelStore
from ospruner.train.policies import SavedPolicy
from ospruner.train.trainer import StopTrainer

from ..conftest import MadeOnce
from ..label_rows import label_row

MakeTrainer = Callable[..., StopTrainer]
Fit = Callable[..., list[SavedPolicy]]
TINY = LabelSettings(base_model="tiny", reasoning_format=DEEPSEEK_R1.to_dict())
PRICES = [3e-2, 1e-2, 5e-3]
"""Started at 1e-2, this problem collapses to "never stop", as the paper describes."""
RANGE = [5e-4, 0.1]  # of the rule; up to 5e-2 it collapses to "never stop"
SETTINGS: dict[str, Any] = {"head": "fixed", "prices": PRICES, "tuning": "layers", "average": 0.0}
SETTINGS |= {"num_train_epochs": 5, "batch_size": 8, "disable_tqdm": True, "use_cpu": True}
SETTINGS |= {"learning_rate": 2e-3, "head_learning_rate": 1e-2}
SHORT = SETTINGS | {"prices": [1e-2], "num_train_epochs": 1}
PRICED = SETTINGS | {"head": "price", "prices": RANGE, "num_train_epochs": 10}
PROBE = {k: v for k, v in SHORT.items() if k not in ("head", "prices")} | {"method": "probe"}


def sums(count: int) -> list[Problem]:
    """So many problems."""
    return [Problem(f"p{n}", f"What is {n} + 4?", str(n + 4)) for n in range(count)]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Rows as a file of JSON lines; its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def command(*words: object) -> str:
    """Runs `ospruner` in this process; what it prints, in one line."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def ending_at(step: int, seen: list[int] | None = None) -> Callable[..., None]:
    """A progress that ends the run at a step of training, and keeps those before."""

    def progress(phase: str, done: int, total: int, note: str = "") -> None:
        if phase == "train":
            if seen is not None:
                seen.append(done)
            if done == step:
                raise InterruptedError

    return progress


@contextmanager
def files_for_a_group(folder: Path) -> Iterator[None]:
    """All that is written into a folder meanwhile can be read by a group, as the umask says."""
    before = os.umask(0o027)
    try:
        yield
    finally:
        os.umask(before)
    files = {file: file.stat().st_mode & 0o777 for file in folder.rglob("*") if file.is_file()}
    assert len(files) > 3
    assert {file: mode for file, mode in files.items() if mode != 0o640} == {}


# Tokens of the tiny tokenizer.
PROMPT = [320, 307, 223, 21, 327]  # "Ann has 3 apples"
WORDS = (327, 325, 331)  # " apples buys more"
SOLVED = 3 * (223, 25)  # " 7 7 7"
BOUNDARY = 260  # ".\n\n"


def make_labels(count: int, seed: int = 0, prefix: str = "p", **changes: Any) -> Dataset:
    """So many labelled traces; from step `solved_at` on, digits and "7" show that it is solved."""
    draws = np.random.default_rng(seed)
    rows = []
    for n in range(count):
        steps, ids, ends = int(draws.integers(3, 9)), list[int](), list[int]()
        solved_at = int(draws.integers(1, steps))
        for step in range(steps):
            body = SOLVED if step >= solved_at else WORDS
            ids += [*(body[i] for i in draws.integers(0, len(body), 4)), BOUNDARY]
            ends.append(len(ids))
        right = [float(step >= solved_at) for step in range(steps)]
        row: dict[str, Any] = {"family": "", "problem": f"Ann {prefix}{n} has 3 apples"}
        row |= {"prompt_ids": PROMPT, "trace_ids": ids, "step_ends": ends}
        row |= {"forced_answers": ["7" if one else "3" for one in right], "forced_correct": right}
        row |= {"matches_final": [one == right[-1] for one in right]}
        row |= {"answer": "7", "natural_answer": "7", **changes}
        rows.append(label_row(f"{prefix}{n}", steps=steps, **row))
    return Dataset.from_list(rows, features=FEATURES)


@pytest.fixture(scope="session")
def labelled(made_once: MadeOnce) -> Path:
    """The embedded reasoner's labels of 60 problems in `train`, and of 60 others in `test`."""

    def make(folder: Path) -> None:
        Reasoner().label(draw_split("train", 60, 7), folder / "train", 7)
        Reasoner().label(draw_split("test", 60, 8), folder / "test", 8)

    return made_once("labelled", make)


@pytest.fixture
def labels(labelled: Path) -> Path:
    """Those to train on."""
    return labelled / "train"


def rewrite(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Changes the rows of a label folder in place."""
    with LabelStore(folder, LabelSettings.from_dict(read_manifest(folder)["settings"])) as store:
        store.rewrite(change)
        store.finish()
    (folder / PROVENANCE_FILE).unlink()


@pytest.fixture
def make_trainer(
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_base_dir: Path,
    tmp_path: Path,
) -> MakeTrainer:
    """A trainer on so many made-up traces, or on given ones, as labels of the tiny base."""
    made = replace(TINY, base_model=str(tiny_base_dir))

    def make(
        settings: dict[str, Any] = SETTINGS,
        labels: Dataset | int = 64,
        out: Path = tmp_path / "run",
        validation: Dataset | int = 40,
        **named: Any,
    ) -> StopTrainer:
        ours = make_labels(labels) if isinstance(labels, int) else labels
        if isinstance(validation, int):
            validation = make_labels(validation, seed=1, prefix="v")
        given: dict[str, Any] = {"model": tiny_base, "processing_class": tiny_tokenizer, **named}
        sets = Labels(ours, made, ""), Labels(validation, made, "")
        return StopTrainer(StopConfig(str(out), **settings), *sets, **given)

    return make


@pytest.fixture
def fit(make_trainer: MakeTrainer) -> Fit:
    """Trains, and gives the policies."""

    def run(*arguments: Any, **named: Any) -> list[SavedPolicy]:
        trainer = make_trainer(*arguments, **named)
        trainer.train()
        return trainer.policies

    return run


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, and remembers the most.

    As torch.distributed._tools.mem_tracker, whose hooks do not take a base without gradients.

    Args:
        tensors: those that are there already.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=weakref.ref)
        for tensor in tensors:
            self._take(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._take, out)
        return out

    def _take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


def trained_on(labels: Any, out: Path, validation: Any = None, **fields: Any) -> SavedPolicy:
    """A small policy of labels: a head alone of one price, unless told otherwise."""
    quick: dict[str, Any] = {"layers": 0, "batch_size": 8, "num_train_epochs": 1}
    quick |= {"use_cpu": True, "disable_tqdm": True}
    if "method" not in fields:
        quick |= {"head": "fixed", "prices": [1e-3]}
    trainer = StopTrainer(StopConfig(str(out), **quick | fields), labels, validation)
    trainer.train()
    return trainer.policies[-1]


def told_otherwise(folder: Path, source: dict[str, Any] | None = None, **changed: Any) -> Path:
    """A folder of labels whose manifest states other settings."""
    manifest = read_manifest(folder)
    settings = LabelSettings.from_dict(manifest["settings"] | changed)
    about = {"settings": settings.to_dict(), "source": source or manifest["source"]}
    write_checked(folder / "manifest.json", manifest | about)
    return folder


def log_of(out: Path) -> list[dict[str, Any]]:
    """What a finished run has logged."""
    state = json.loads((out / "trainer_state.json").read_text("utf-8"))
    return list(state["log_history"])
