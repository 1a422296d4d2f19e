"""`ospruner demo`: the whole job on the embedded reasoner, from sampling to pruned generation.

It is a run of `ospruner.make`'s stages (`rounds.Rounds`) with one round of all its toy problems;
then come what only the demo has: two baselines, test problems that are looked at once, the claims,
and the saved policy, loaded, that generates.
"""

import dataclasses
import json
import os
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import ospruner
from modeling_ospruner import OSPrunerConfig
from ospruner.eval.evaluation import Report
from ospruner.eval.methods import EVERY_PRICE
from ospruner.eval.metrics import CHOSEN_BY
from ospruner.eval.problems.problem import Problem
from ospruner.eval.problems.task import Math
from ospruner.eval.report.summary import results_table
from ospruner.eval.results import RESULTS_FILE, Results, main_rows
from ospruner.eval.table import TraceTable
from ospruner.formats import DEEPSEEK_R1
from ospruner.hub_cards.staging import write_json
from ospruner.progress import PhaseBars, Progress
from ospruner.provenance import hash_files, read_object, read_provenance
from ospruner.rounds import Rounds, train_policy
from ospruner.train.config import StopConfig
from ospruner.train.labels.loading import Labels, load_labels
from ospruner.train.run_folder import claimed, record_of
from ospruner.workers import Job, Workers

from . import REASONER
from .problems import Split
from .shipped import MAX_ANSWER_TOKENS, MAX_THINKING_TOKENS, write_split

METHODS = ("os-pruner", "probe", "convergence")
SPLITS: tuple[Split, ...] = ("train", "test", "validation")  # the longest first
PRICES = [5e-5, 1e-2]
LABELLING: dict[str, Any] = {
    **{"engine": "transformers", "device": "cpu", "batch_size": 256, "chunk": 512},
    **{"max_thinking_tokens": MAX_THINKING_TOKENS, "max_answer_tokens": MAX_ANSWER_TOKENS},
}
SHOWN_EVERY = 6  # of the frontier's 31 prices, in the printed table
MIN_SAVED = 0.25
MIN_PROBLEMS = 300
"""With fewer test problems chance decides on more than the policies do."""
MOSTLY = 0.6
"""Families of which the reasoner gets at least so many right are shown side by side."""
ENDED_BY = {"policy": "the policy", "budget": "a budget", "natural": "the model"}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 0}
MADE_BY = ("command", "created_utc", "git_commit", "git_modified", "packages", "python", "platform")


@dataclass(frozen=True)
class DemoSize:
    """How much the demo does."""

    name: str
    train: int  # problems whose traces policies are trained on
    validation: int  # problems on which price and thresholds are chosen, and the promise is made
    test: int  # problems that are looked at once, at the end
    seeds: int  # training runs of each method; their outcomes are pooled
    epochs: int  # passes over the training traces, for OS-Pruner and each baseline alike
    max_loss: float  # what `calibrate` shall promise on the validation traces, as a share


QUICK = DemoSize("quick", 160, 80, 100, seeds=1, epochs=24, max_loss=0.1)
STANDARD = DemoSize("standard", 1200, 800, 500, seeds=1, epochs=8, max_loss=0.03)
FULL = DemoSize("full", 12000, 1500, 6000, seeds=3, epochs=8, max_loss=0.02)


def run_demo(out: Path, size: DemoSize, seed: int, console: Console) -> Results:
    """Label, train, promise, compare, load, generate.

    Args:
        out: Folder of the run; a stopped run continues, one of other settings is refused.
        size: How much to do.
        seed: Seed of problems, sampling and training.
        console: Where to draw bars and print.

    Raises:
        ValueError: `out` holds another run's files.
    """
    started = time.monotonic()
    disable_progress_bar()  # transformers' own bars would break into ours
    reasoner = hash_files(sorted(path for path in REASONER.iterdir() if path.is_file()))
    with claimed(out, {"size": vars(size), "seed": seed, "reasoner": reasoner}):
        with PhaseBars(console) as bars:
            run = _Demo(out, size, seed, bars)
            with run.workers:
                policy = run.go_on(partial(console.print, highlight=False))
            report, promise = run.compared(policy)
        page = run.finish(report, name="OS-Pruner demo policy", license={"license": "apache-2.0"})
        _print(report.results, promise, console)
        generate_side_by_side(out, seed, report.results, console)
        shutil.rmtree(run.more["states"], ignore_errors=True)
    minutes = (time.monotonic() - started) / 60
    said = f"Policy: {policy}; numbers: {out / 'report' / RESULTS_FILE}; page: {page}"
    console.print(f"{said}; {minutes:.1f} minutes.", soft_wrap=True)
    return report.results


class _Demo(Rounds):
    """One round of all problems; the test's labels and the baselines are made beside its own.

    Jobs run side by side, one a core and at least one a split: three at once on two cores end
    sooner than two and then one. The numbers do not depend on it.
    """

    def __init__(self, out: Path, size: DemoSize, seed: int, progress: Progress) -> None:
        sizes = [size.train + size.validation]
        super().__init__(out, sizes, size.max_loss, "cpu", progress)
        self.size, self.seed = size, seed
        self.labels = {split: out / "labels" / split for split in SPLITS}
        seeds = range(seed, seed + size.seeds)
        self.configs = [train_config(out, size, one, name) for name in METHODS for one in seeds]
        self.folders = [str(one.output_dir) for one in self.configs]
        self.workers = Workers(max(os.cpu_count() or 1, len(SPLITS)), "ospruner.rounds")

    def folder(self, size: int) -> Path:
        """See `Rounds.folder`."""
        return Path(self.folders[0])

    def label(self, size: int) -> tuple[Labels, Labels]:
        """See `Rounds.label`; the toy problems have sides of their own."""
        jobs: dict[str, Job] = {}
        for split, out in self.labels.items():
            problems = write_split(self.out, split, vars(self.size)[split], self.seed)
            more = {"out": out, "seed": self.seed, **LABELLING}
            jobs[split] = partial(ospruner.label, REASONER, problems, **more)
        self.workers.run(jobs, self.progress)
        return load_labels(self.labels["train"]), load_labels(self.labels["validation"])

    def train(self, size: int, training: Labels, validation: Labels) -> None:
        """See `Rounds.train`."""
        sides = self.labels["train"], self.labels["validation"]
        trained = {f"{one.method}, seed {one.seed}": one for one in self.configs}
        jobs = {name: partial(train_policy, one, *sides) for name, one in trained.items()}
        self.workers.run(jobs, self.progress)

    def compared(self, policy: Path) -> tuple[Report, pd.DataFrame | None]:
        """All that was trained on the test problems, and there the setting that is promised.

        The price that validation chose, over all seeds, becomes the default of `policy`.
        """
        test = self.labels["test"]
        named: Any = {"model": "embedded reasoner", "benchmark": "test problems", **self.more}
        report = ospruner.compare(test, self.folders, choose_on=self.labels["validation"], **named)
        promise = None
        for one in OSPrunerConfig.from_pretrained(policy).calibrations or ():
            use, at = f"{policy}@{one['threshold']}", [one["price"]]
            promise = ospruner.compare(test, [use], prices=at, **named).results.rules[1:2]
        price = {"price": float(_chosen(report.results)["parameter"])}
        write_json(policy / "config.json", read_object(policy / "config.json") | price)
        made = vars(read_provenance(policy))
        run = {name: made[name] for name in MADE_BY}
        about = {
            "run": run | {"seed": self.seed, "settings": vars(self.size)},
            "promise": self.best.promise,
            "claims": claims(report.results, promise, self.max_loss),
        }
        report = dataclasses.replace(report, about={**report.about, **about})
        report.results.save(policy / RESULTS_FILE)
        return report, promise


def train_config(out: Path, size: DemoSize, seed: int, method: str = "os-pruner") -> StopConfig:
    """A training run of the demo in its folder."""
    own: dict[str, Any] = {"prices": PRICES} if method == "os-pruner" else {}
    return StopConfig(
        str(out / "policies" / f"seed{seed}" / method),
        method=method,
        seed=seed,
        num_train_epochs=size.epochs,
        learning_rate=5e-4,
        head_learning_rate=3e-3,
        states=str(out / "states"),
        disable_tqdm=True,
        use_cpu=True,
        **own,
    )


def size_and_seed(out: Path) -> tuple[DemoSize, int]:
    """Of the demo that a folder holds."""
    record = record_of(out)
    return DemoSize(**record["size"]), record["seed"]


def claims(results: Results, promise: pd.DataFrame | None, max_loss: float) -> list[dict[str, Any]]:
    """What the proof asks for: each claim, whether the point estimate meets it, the numbers."""
    rules = results.rules
    tokens = rules["tokens"][rules["method"] == EVERY_PRICE].tolist()
    falls = f"{tokens[0]:.0f} to {tokens[-1]:.0f} over {len(tokens)} prices"
    told: list[tuple[str, bool, str]] = [
        ("thinking tokens fall as their price rises", tokens == sorted(tokens)[::-1], falls)
    ]
    full = rules.iloc[0]
    enough = full["problems"] >= MIN_PROBLEMS
    if enough and promise is not None:
        kept = promise.iloc[0]
        loss, saved = full["accuracy"] - kept["accuracy"], kept["reduction"]
        points = f"the promise of at most {100 * max_loss:g} points lost is kept"
        least = f"and saves at least {100 * MIN_SAVED:.0f} % of the thinking tokens"
        told += [
            (points, loss <= max_loss, f"{-100 * loss:+.2f} points"),
            (least, saved >= MIN_SAVED, f"{100 * saved:.1f} %"),
        ]
    if enough:
        ours = _chosen(results)["aes"]
        others = main_rows(rules[rules["method"] != EVERY_PRICE])[1:]
        rivals = pd.concat([others, results.limits[:1]])  # the best fixed budget
        for rival, aes in zip(rivals["method"], rivals["aes"], strict=True):
            told.append((f"AES above {rival}", ours > aes, f"{ours:.3f} against {aes:.3f}"))
    return [{"claim": c, "holds": bool(holds), "numbers": said} for c, holds, said in told]


def _chosen(results: Results) -> pd.Series:
    """OS-Pruner at the price that validation chose."""
    assert results.chosen is not None  # there were labels to choose on
    return results.rules.loc[results.chosen]


def _print(results: Results, promise: pd.DataFrame | None, console: Console) -> None:
    rules, ours = results.rules, _chosen(results)
    frontier = rules.index[rules["method"] == EVERY_PRICE]
    shown = rules.loc[main_rows(rules).index.union(frontier[::SHOWN_EVERY])]
    if promise is not None:
        promise = promise.assign(method=f"{EVERY_PRICE} (promise)")
    table = pd.concat([shown, promise, results.limits])
    console.print()
    console.print(results_table(table, f"{results.dataset}: {results.setting}"))
    console.print(
        f"One policy knows all {len(frontier)} prices of a token; the table shows some, the "
        f"picture and the file all. Its default is {ours['setting']}, chosen as each baseline's "
        f"threshold: {CHOSEN_BY}."
    )
    console.print(f"Calibrated on validation: {results.about['promise']}")
    table = Table(title="What should hold", show_header=False)
    for one in results.about["claims"]:
        table.add_row(one["claim"], one["numbers"], "holds" if one["holds"] else "DOES NOT HOLD")
    console.print(table)
    if (count := ours["problems"]) < MIN_PROBLEMS:
        console.print(f"{count} test problems are too few to claim more: leave --quick out.")


def generate_side_by_side(out: Path, seed: int, results: Results, console: Console) -> None:
    """Loads the policy as any user would, and generates three test problems with it off and on.

    They are drawn at random from the families of which the reasoner mostly gets the answer right;
    below them stands what the policy does over all test problems.
    """
    lines = (out / "test.jsonl").read_text().splitlines()
    table = TraceTable.from_dataset(load_labels(out / "labels" / "test").traces)
    right = pd.Series(table.full_correct).groupby(table.families).mean()
    problems = [one for one in map(json.loads, lines) if right[one["family"]] >= MOSTLY]
    drawn = Random(f"side by side/{seed}").sample(problems, 3)
    model: Any = AutoModelForCausalLM.from_pretrained(out / "policy", dtype=torch.float32)
    shown = Table("problem", "answer", "stop_policy=False", "stop_policy=True", "saved")
    shown.title = "Generated by the policy that was saved: AutoModelForCausalLM"
    rows = []
    for problem in drawn:
        content = f"{problem['problem']}\n\n{DEEPSEEK_R1.user_instruction}"
        off, on = (_answered(model, content, seed, stop) for stop in (False, True))
        rows.append({"content": content, "off": off, "on": on})
        cells = []
        for one in (off, on):
            right = Math().grade(
                Math().read_free(one["answer"]), Problem("", "", problem["answer"])
            )
            mark = "right" if right else "wrong"  # in words, for it must be told without colours
            cells.append(f"{one['answer']} ({mark})\n{one['thinking_tokens']} tokens")
        cells[1] += f", ended by {ENDED_BY.get(on['reason'], 'a limit')}"
        saved = 1 - on["thinking_tokens"] / max(off["thinking_tokens"], 1)
        shown.add_row(problem["problem"], problem["answer"], *cells, f"{saved:.0%}")
    write_json(out / "side_by_side.json", {"rows": rows})
    console.print(shown)
    ours, full = _chosen(results), results.rules.iloc[0]
    traces = full["traces"]
    solved, broken = full["accuracy"] * traces, ours["harmed"] * traces
    console.print(
        f"Of all {traces} test answers {solved:.0f} are right without the policy. At its default, "
        f"{ours['setting']}, it saves {ours['reduction']:.0%} of the thinking tokens; in the mean "
        f"{solved - broken:.0f} right answers are kept, {broken:.0f} broken, and "
        f"{ours['helped'] * traces:.0f} wrong ones mended."
    )


def _answered(model: Any, content: str, seed: int, stop_policy: bool) -> dict[str, Any]:
    """The answer to a message, sampled from a seed: full thinking, or pruned."""
    chat = [{"role": "user", "content": content}]
    template: dict[str, Any] = {"add_generation_prompt": True, "return_dict": True}
    inputs = model.tokenizer.apply_chat_template(chat, return_tensors="pt", **template)
    torch.manual_seed(seed)
    most = MAX_THINKING_TOKENS + MAX_ANSWER_TOKENS
    output = model.generate(**inputs, **SAMPLING, max_new_tokens=most, stop_policy=stop_policy)
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    end = model.token_format.think_end_id
    count = ids.index(end) if end in ids else len(ids)
    return {
        "thinking": model.tokenizer.decode(ids[:count]),
        "answer": model.tokenizer.decode(ids[count + 1 :], skip_special_tokens=True).strip(),
        "thinking_tokens": count,
        "reason": model.last_stop[0].reason if stop_policy else "natural",
    }
