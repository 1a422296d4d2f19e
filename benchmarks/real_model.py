"""Labels, trains and compares on a pretrained model, by one command.

    python benchmarks/real_model.py --base FOLDER_OR_ID --out runs/real-model [--files DIR]
        [--problems 800 200 300 60] [--dtype bfloat16] [--engine vllm] [--only labels]
        [--studies paper grid] [--json FILE]
    python benchmarks/real_model.py --base runs/thinker --out runs/thinks --files DIR
        --format deepseek-r1 --prompt default --exclude runs/thinker/problems.jsonl

The first form is for a model without thinking markers. The second is for one that
`docs/examples/thinker.py` has taught to think: no problem that it learnt is asked.

These commands run one after the other, each as one would type it; all of them are printed:

    ospruner label        GSM8K's train problems (800 to train on, 200 for validation), 300 of its
                          test problems, 60 of MATH-500
    ospruner train        one policy of every price (of so many seeds), and the baselines on the
                          same pass of the base
    ospruner compare      whole methods and fixed thresholds; --online, seconds in transformers
    benchmarks/serve.py   seconds in vLLM, of a batch that drains; serve_http.py, under steady load

`--studies` adds: `paper`, a policy for each price as the paper trains it; `grid`, each baseline
with the passes and rates, of a small grid, with which its frontier on validation is best. What
fewer labels and other tails give, tails.py measures on the same labels.

A command that was stopped goes on when this one runs again; finished evaluations are not repeated
while their labels and policies are the same. Seconds are added up over all runs. `--problems` says
how many of each set (0: none of it); more of them later go on from the fewer. The base runs once
over each set of labels: its states are kept for all methods and evaluations (`--states`).

Traces are sampled at a temperature of 0.7 from the whole vocabulary: on a CPU, top-p would sort its
152,000 logits for each row and token, a fifth of the time.
"""

import itertools
import json
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timing

from ospruner.calibrating import calibrate
from ospruner.comparing import Judged, compare
from ospruner.eval.evaluation import Rule
from ospruner.eval.frontiers import frontiers
from ospruner.eval.learnstop import LEARN_STOP
from ospruner.eval.measured import family_thresholds
from ospruner.eval.methods import parse_policies
from ospruner.eval.replay import replay
from ospruner.eval.table import TraceTable
from ospruner.provenance import hash_files, read_provenance
from ospruner.train.labels.loading import load_labels
from ospruner.train.labels.statistics import stats_of

PROBLEMS = {
    "train": ("gsm8k", "train[:6000]", "gsm8k_train"),
    "validation": ("gsm8k", "train[6000:]", "gsm8k_train"),
    "gsm8k": ("gsm8k", "test", "gsm8k_test"),
    "math500": ("math500", None, "math500"),
}
"""Of each set of labels: dataset, split, local file."""
READ = ("manifest.json", "run.json")
"""What tells labels, and policies, from others in the same folder."""
NO_STEP = 10**6
"""A stride at which a trace is labelled at its end alone."""
FRACTIONS = tuple(k / 20 for k in range(1, 21))
LOSSES = (0.01, 0.02, 0.05)
GAPS = "2e-3,1e-3,3e-4,1e-4"
BASELINES = ("probe", "convergence", "final-answer")
FREE = ("entropy:0.4", "deer:0.95", "agreement:2", "agreement:3", "es-cot:3")
GRID = tuple(itertools.product((1, 2, 4, 8), (1.0, 0.3)))
"""Of the study "grid": passes, and shares of the rates that `ospruner train` takes."""
PAPER = {"head": "fixed", "tuning": "layers", "average": 0, "prices": "auto", "num_train_epochs": 1}
MADE_BY = ("git_commit", "git_modified", "created_utc", "data_hash", "packages")


class RealModel:
    """Runs commands as one would type them, and keeps in `commands.json` what each has cost.

    Args:
        args: of this benchmark; their `out` is the folder of everything.

    Attributes:
        sets: how many problems are asked for of each set of labels that is asked for.
        tests: of these the ones to measure on.
    """

    def __init__(self, args: Namespace) -> None:
        self.args, self.out, self.labels = args, args.out, args.out / "labels"
        self.states, self.file = args.out / "states", args.out / "commands.json"
        self.sets = {name: n for name, n in zip(PROBLEMS, args.problems, strict=True) if n}
        self.tests = [name for name in self.sets if name not in ("train", "validation")]
        self.out.mkdir(parents=True, exist_ok=True)
        self.kept: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def run(self, name: str, *words: object, **fields: Any) -> None:
        """Runs one command, unless it has finished with the same words, labels and policies.

        Args:
            name: of its entry in `commands.json`.
            words: `ospruner`, or a script of this folder, and what follows it; folders of labels
                and of policies that it reads are `Path`s.
            fields: what `--set` gives; None is left out.

        Raises:
            SystemExit: it failed.
        """
        program, *texts = map(str, words)
        for field, value in fields.items():
            texts += [] if value is None else ["--set", f"{field}={value}"]
        ours = program == "ospruner"
        said = ("ospruner " if ours else f"python benchmarks/{program} ") + shlex.join(texts)
        read = [one / file for one in words for file in READ if isinstance(one, Path)]
        inputs = {str(one.relative_to(self.out)): hash_files([one]) for one in read if one.exists()}
        before = self.kept.get(name, {})
        same = before.get("command") == said and before.get("inputs") == inputs
        if same and before["finished"]:
            return
        print(f"$ {said}", flush=True)
        # More labels of a set add to what the fewer took.
        start = time.monotonic() - (before.get("seconds", 0) if same or not inputs else 0)
        started = ["-m", "ospruner.cli"] if ours else [str(timing.HERE / "benchmarks" / program)]
        code = subprocess.run([sys.executable, *started, *texts]).returncode
        took = {"finished": code == 0, "seconds": time.monotonic() - start}
        self.kept[name] = {"command": said, "inputs": inputs, **took}
        self.file.write_text(json.dumps(self.kept, indent=1), "utf-8")
        if code:
            raise SystemExit(f"{said}: exit status {code}; run this again to go on")

    def numbers(self, name: str) -> Path:
        """The file that `collect` reads of a study."""
        (self.out / name).mkdir(parents=True, exist_ok=True)
        return self.out / name / "numbers.json"

    def label(self) -> None:
        """Labels the sets of problems; those to measure on by other prompts, too, at their end."""
        args = self.args
        asked: list[Any] = [(name, name, args.prompt, None) for name in self.sets]
        beside = itertools.product(self.tests, args.beside)
        asked += [(name, f"{name}-{prompt}", prompt, NO_STEP) for name, prompt in beside]
        shared = {one: vars(args)[one] for one in ("engine", "format", "seed", "dtype", "exclude")}
        shared |= {"temperature": 0.7, "top_p": 1, "chunk": 160, "batch_size": 96}
        shared["max_thinking_tokens"] = args.max_tokens
        for name, folder, prompt, stride in asked:
            dataset, split, file = PROBLEMS[name]
            own = {"prompt": prompt, "step_stride": stride, "limit": self.sets[name]}
            own |= {"split": split, "files": args.files and args.files / f"{file}.jsonl.gz"}
            words = ("label", "--base", args.base, "--dataset", dataset)
            out = str(self.labels / folder)
            self.run(f"label {folder}", "ospruner", *words, "--out", out, **shared, **own)

    def train_one(self, name: str, seed: int, **fields: Any) -> Path:
        """Trains a policy, on states of the base that all policies of its tail share."""
        out, bf16 = self.out / "policies" / name, self.args.dtype == "bfloat16" or None
        fields |= {"base": self.args.base, "seed": seed, "states": self.states, "bf16": bf16}
        sides = ("--labels", self.labels / "train", "--validation", self.labels / "validation")
        self.run(f"train {name}", "ospruner", "train", *sides, "--out", str(out), **fields)
        return out

    def train(self) -> list[Path]:
        """Trains the policies of every price and the baselines."""
        args, first = self.args, self.args.seed
        seeds = range(first, first + args.seeds)
        policies = [self.train_one(f"price-{seed}", seed) for seed in seeds]
        if args.verifier:
            judge = {"method": "flashthink", "verifier": args.verifier}
            policies.append(self.train_one("flashthink", first, **judge))
        plain = [self.train_one(name, first, method=name) for name in BASELINES]
        if "grid" not in args.studies:
            return policies + plain
        validation = Judged(self.labels / "validation", args.base, states=self.states)
        return policies + [self.tuned(validation, one) for one in plain]

    def tuned(self, validation: Judged, plain: Path) -> Path:
        """A baseline with the passes and rates of the largest area on validation."""
        name = plain.name
        settings = json.loads((plain / "run.json").read_text("utf-8"))["settings"]
        places = {f"{settings['num_train_epochs']:g} passes": plain}
        for passes, share in GRID:
            fields = {one: share * settings[one] for one in ("learning_rate", "head_learning_rate")}
            fields |= {"method": name, "num_train_epochs": passes}
            tried = self.train_one(f"{name}-{passes}-{share:g}", self.args.seed, **fields)
            places[f"{passes} passes, {share:g} of the rates"] = tried
        areas = {what: validation_area(validation, policy) for what, policy in places.items()}
        for what, area in areas.items():
            print(f"{name}, {what}: area on validation {100 * area:.2f} %", flush=True)
        self.numbers(f"grid/{name}").write_text(json.dumps(areas, indent=1), "utf-8")
        return places[max(areas, key=areas.__getitem__)]

    def compare_one(self, out: str, test: str, policies: Sequence[Path], rules: Any = ()) -> None:
        """Compares policies and rules on a set of test problems, chosen on validation."""
        labels, base = self.labels, self.args.base
        beside = ", ".join(str(labels / f"{test}-{prompt}") for prompt in self.args.beside)
        asked: tuple[object, ...] = ("compare", labels / test, *policies, *rules, "--prices", "all")
        asked += ("--choose-on", labels / "validation", "--base", base, "--states", self.states)
        asked += ("--out", str(self.out / out), "--json", self.numbers(out))
        fields = {"rewards_at": GAPS, "beside": f"[{beside}]" if beside else None}
        self.run(out, "ospruner", *asked, **fields, train=labels / "train", benchmark=test)

    def compare(self, policies: Sequence[Path]) -> None:
        """Whole methods, and rules at fixed thresholds, on the test problems."""
        for test in self.tests:
            self.compare_one(f"frontier/{test}", test, policies, self.args.rules)
            self.compare_one(f"replay/{test}", test, policies, FREE)
        if "paper" in self.args.studies:
            policy = self.train_one("paper/annealed", self.args.seed, **PAPER)
            self.compare_one("studies/paper/annealed", self.tests[0], [policy])

    def promises(self, policy: Path) -> None:
        """What validation can promise of a policy, and whether the first test problems keep it."""
        validation, test = (str(self.labels / one) for one in ("validation", self.tests[0]))
        more: dict[str, Any] = {"base": str(self.args.base), "states": self.states}
        found = {}
        for most in LOSSES:
            made = calibrate(policy, validation, most, **more)
            found[f"{most:g}"] = said = {**vars(made), "kept": None}
            if made.value is not None:
                frame = compare(test, [f"{policy}@.5"], prices=[made.value], **more).frame
                full, ours = frame["accuracy"][:2]
                said |= {"test_loss": full - ours, "test_saved": frame["reduction"][1]}
                said["kept"] = bool(full - ours <= most)
            told = f"promise of {100 * most:g} points: {made.told(most, 0.95)}; {said['kept']}"
            print(told, flush=True)
        self.numbers("promises").write_text(json.dumps(found, indent=1), "utf-8")

    def seconds(self) -> None:
        """Seconds in vLLM and in transformers."""
        args, labels = self.args, self.labels / "gsm8k"
        policy, seed = self.out / f"policies/price-{args.seed}", ("--seed", args.seed)
        same = ("--policy", policy, "--labels", labels, "--price", 1e-3, "--dtype", args.dtype)
        few, many = ("--requests", 64, "--rounds", 1), ("--streams", 1, 8, 64)
        self.run("served gsm8k", "serve.py", *same, *few, "--json", self.numbers("served"))
        self.run("load gsm8k", "serve_http.py", *same, *many, *seed, "--json", self.numbers("load"))
        asked = ("compare", labels, policy, "--online", "--base", args.base, "--limit", 16)
        out = ("--out", str(self.out / "online"), "--json", self.numbers("online"))
        more = (*asked, "--samples", 1, *seed, *out)
        self.run("online gsm8k", "ospruner", *more, batch_problems=8)

    def collect(self) -> dict[str, Any]:
        """Everything that was measured, as one JSON object."""
        places = {name: self.labels / name for name in self.sets}
        made = {name: vars(read_provenance(place)) for name, place in places.items()}
        found: dict[str, Any] = {
            "commands": self.kept,
            "seed": self.args.seed,
            "label_settings": load_labels(places["train"]).settings.to_dict(),
            "problems": {name: stats_of(one) | shape_of(one) for name, one in places.items()},
            "made_by": {name: {key: of[key] for key in MADE_BY} for name, of in made.items()},
        }
        for file in sorted(self.out.glob("*/**/numbers.json")):
            kind, *name = file.relative_to(self.out).parts[:-1]
            numbers = json.loads(file.read_text("utf-8"))
            if kind in ("served", "load", "promises"):
                found[kind] = numbers
            else:
                found.setdefault(kind, {})["/".join(name) or "gsm8k"] = numbers
        return found


def validation_area(validation: Judged, policy: Path) -> float:
    """The area under a classifier's frontier on the traces that choose."""
    (use, *_), table = parse_policies([str(policy)]), validation.split.table
    said = validation.said(use).probabilities()
    free = np.arange(said.shape[1]) < table.last[:, None]
    rules = []
    for value in family_thresholds(LEARN_STOP, np.where(free, said, np.nan)):
        outcome = replay(table, said, value)
        rules.append(Rule(use.method, outcome, value, "threshold", validation=(outcome,)))
    found, _ = frontiers({use.method: rules}, table, table)
    return float(found["validation_area"][0])


def shape_of(labels: Path) -> dict[str, Any]:
    """How the traces of a set of labels run: lengths, and when their answers are right."""
    table = TraceTable.from_dataset(load_labels(labels).traces)
    rows, full, right = np.arange(len(table)), table.full_tokens, table.correct >= 0.5
    ever, first = right.any(axis=1), table.lengths[rows, right.argmax(axis=1)] / full
    taken = []
    for share in FRACTIONS:
        reached = (table.mask & (table.lengths <= share * full[:, None])).sum(axis=1)
        taken.append(np.where(reached > 0, table.correct[rows, reached - 1], 0.0).mean())

    def tenths(values: np.ndarray) -> dict[str, float]:
        return {str(q): float(np.quantile(values, q)) for q in (0.1, 0.5, 0.9) if len(values)}

    return {
        "right_then_wrong": float((ever & (table.full_correct < 0.5)).mean()),
        "fractions": list(FRACTIONS),
        "accuracy_by_fraction": np.array(taken).tolist(),
        "first_right_fraction": tenths(first[ever]),
        "tokens_per_trace": tenths(full),
    }


def main() -> None:
    """Runs everything that is not yet there, and writes all numbers as one JSON object."""
    parser = timing.options(__doc__)
    parser.set_defaults(seed=1)
    parser.add_argument("--base", required=True, help="folder or Hub id of the model")
    parser.add_argument("--out", type=Path, default=Path("runs/real-model"))
    parser.add_argument("--files", type=Path, help="folder of gsm8k_train.jsonl.gz and the others")
    sets: dict[str, Any] = {"nargs": 4, "type": int}
    sets["metavar"] = ("TRAIN", "VALIDATION", "GSM8K", "MATH")
    parser.add_argument("--problems", **sets, default=[800, 200, 300, 60], help="of each set")
    parser.add_argument("--seeds", type=int, default=1, help="of training, for our policy")
    parser.add_argument("--studies", nargs="+", choices=("paper", "grid"), default=[])
    parser.add_argument("--only", choices=("labels", "replay"), help="end after these")
    parser.add_argument("--max-tokens", type=int, default=1000, help="of a trace's thinking")
    parser.add_argument("--engine", default="vllm", help="that labels: vllm or transformers")
    parser.add_argument("--dtype", default="auto", help="bfloat16 where it is fast")
    parser.add_argument("--format", default="plain", help="the base's reasoning format")
    parser.add_argument("--prompt", default="check", help="how problems are put")
    parser.add_argument("--rules", nargs="+", default=["rules"], help="to compare with")
    parser.add_argument("--beside", nargs="*", default=[], help="other prompts: rows of the tables")
    parser.add_argument("--verifier", type=Path, help="another model, for a row of FlashThink")
    parser.add_argument("--exclude", type=Path, help="a file of problems to leave out: learnt ones")
    one = RealModel(timing.parse(parser))
    one.label()
    if one.args.only != "labels":
        policies = one.train()
        one.compare(policies)
        one.promises(policies[0])
    if one.args.only is None:
        one.seconds()
    timing.print_last_line(one.collect(), one.args.json)


if __name__ == "__main__":
    main()
