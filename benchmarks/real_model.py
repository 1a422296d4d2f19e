"""Labels, trains and compares on a pretrained model, by one command.

    python benchmarks/real_model.py --base FOLDER_OR_ID --out runs/real-model [--files DIR]
        [--problems 800 200 300 60] [--dtype bfloat16] [--engine vllm] [--only labels]
        [--studies curve tails paper grid] [--json FILE]
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
    benchmarks/serve.py   seconds in vLLM; engines.py, what each engine labels a second

`--studies` adds: `curve`, policies of fewer labelled problems; `tails`, the head alone, one layer,
four, whole layers; `paper`, a policy for each price as the paper trains it; `grid`, each baseline
with the passes and rates, of a small grid, with which its frontier on validation is best.

A command that was stopped goes on when this one runs again; finished evaluations are not repeated
while their labels and policies are the same. Seconds are added up over all runs. `--problems` says
how many of each set (0: none of it); more of them later go on from the fewer. The base runs once
over each set of labels: its states are kept for all methods and evaluations (`--states`).

Traces are sampled at a temperature of 0.7 from the whole vocabulary: on a CPU, top-p would sort its
152,000 logits for each row and token, a fifth of the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timing

from ospruner.calibrating import calibrate
from ospruner.comparing import Judged
from ospruner.comparing import compare as compare_labels
from ospruner.eval.evaluation import Rule
from ospruner.eval.frontiers import frontiers
from ospruner.eval.learnstop import LEARN_STOP
from ospruner.eval.measured import family_thresholds
from ospruner.eval.methods import parse_policies
from ospruner.eval.replay import replay
from ospruner.provenance import hash_files, read_provenance
from ospruner.train.labels.folder import read_labels
from ospruner.train.labels.statistics import stats_of

PROBLEMS = {
    "train": ("gsm8k", "train[:6000]", "gsm8k_train"),
    "validation": ("gsm8k", "train[6000:]", "gsm8k_train"),
    "gsm8k": ("gsm8k", "test", "gsm8k_test"),
    "math500": ("math500", None, "math500"),
}
"""Of each set of labels: dataset, split, local file."""
NO_STEP = 10**6
"""A stride at which a trace is labelled at its end alone."""
FRACTIONS = tuple(k / 20 for k in range(1, 21))
TENTHS = (0.1, 0.5, 0.9)

LOSSES = (0.01, 0.02, 0.05)
GAPS = "2e-3,1e-3,3e-4,1e-4"
BASELINES = ("probe", "convergence", "final-answer")
PASSES, RATES = (1, 2, 4, 8), (1.0, 0.3)
"""The grid of the study "grid": passes, and shares of the rates that `ospruner train` takes."""
CURVE = (50, 100, 200, 400)
"""Labelled problems that the policies of the study "curve" learn from."""
TAILS: dict[str, dict[str, Any]] = {
    "head": {"layers": 0},
    "queries-1": {"layers": 1},
    "queries-4": {"layers": 4},
    "layers-2": {"tuning": "layers"},
}
PAPER = {"head": "fixed", "tuning": "layers", "average": 0, "prices": "auto", "num_train_epochs": 1}
ARMS = ("transformers:float32", "transformers:bfloat16", "vllm:float32", "vllm:bfloat16")
MADE_BY = ("git_commit", "git_modified", "created_utc", "data_hash", "packages")


class Commands:
    """Runs commands as one would type them, and keeps in `commands.json` what each has cost.

    Args:
        args: of this benchmark; their `out` is the folder of everything.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out, self.labels = args, args.out, args.out / "labels"
        self.out.mkdir(parents=True, exist_ok=True)
        self.file = self.out / "commands.json"
        self.kept: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    @property
    def sets(self) -> dict[str, int]:
        """How many problems are asked for of each set of labels that is asked for."""
        return {name: n for name, n in zip(PROBLEMS, self.args.problems, strict=True) if n}

    @property
    def tests(self) -> list[str]:
        """The sets to measure on."""
        return [name for name in self.sets if name not in ("train", "validation")]

    def run(
        self, name: str, *words: object, depends_on: Sequence[Path] = (), **fields: Any
    ) -> None:
        """Runs one command, unless it has finished with the same words and inputs.

        Args:
            name: of its entry in `commands.json`.
            words: `ospruner`, or a script of this folder, and what follows it.
            depends_on: files whose content the command reads.
            fields: what `--set` gives; None is left out.

        Raises:
            SystemExit: it failed.
        """
        program, *texts = map(str, words)
        given = [f"{field}={value}" for field, value in fields.items() if value is not None]
        texts += [word for one in given for word in ("--set", one)]
        ours = program == "ospruner"
        said = ("ospruner " if ours else f"python benchmarks/{program} ") + shlex.join(texts)
        inputs = {str(path.relative_to(self.out)): hash_files([path]) for path in depends_on}
        before = self.kept.get(name, {})
        same = before.get("command") == said and before.get("inputs") == inputs
        if same and before["finished"]:
            return
        print(f"$ {said}", flush=True)
        # A larger share adds to what a smaller one took.
        start = time.monotonic() - (before.get("seconds", 0) if same or not depends_on else 0)
        started = ["-m", "ospruner.cli"] if ours else [str(timing.HERE / "benchmarks" / program)]
        code = subprocess.run([sys.executable, *started, *texts]).returncode
        took = {"finished": code == 0, "seconds": time.monotonic() - start}
        self.kept[name] = {"command": said, "inputs": inputs, **took}
        self.file.write_text(json.dumps(self.kept, indent=1), "utf-8")
        if code:
            raise SystemExit(f"{said}: exit status {code}; run this again to go on")


def label(commands: Commands) -> None:
    """Labels the sets of problems; those to measure on by other prompts, too, at their end."""
    args = commands.args
    asked = [(name, args.prompt, 1) for name in commands.sets]
    asked += [(name, prompt, NO_STEP) for name in commands.tests for prompt in args.beside]
    for name, prompt, stride in asked:
        dataset, split, file = PROBLEMS[name]
        folder = name if stride == 1 else f"{name}-{prompt}"
        commands.run(
            f"label {folder}",
            *("ospruner", "label", "--base", args.base, "--dataset", dataset),
            *("--out", commands.labels / folder),
            engine=args.engine,
            format=args.format,
            prompt=prompt,
            step_stride=stride if stride > 1 else None,
            temperature=0.7,
            top_p=1,
            chunk=160,
            max_thinking_tokens=args.max_tokens,
            seed=args.seed,
            batch_size=96,
            dtype=args.dtype,
            limit=commands.sets[name],
            split=split,
            files=args.files and args.files / f"{file}.jsonl.gz",
            exclude=args.exclude,
        )


def train_one(commands: Commands, name: str, seed: int, **fields: Any) -> Path:
    """Trains a policy, on states of the base that all policies of its tail share; its folder."""
    labels, out = commands.labels, commands.out / "policies" / name
    settings: dict[str, Any] = {
        "base": commands.args.base,
        "seed": seed,
        "states": commands.out / "states",
        "bf16": commands.args.dtype == "bfloat16" or None,
    }
    commands.run(
        f"train {name}",
        *("ospruner", "train", "--labels", labels / "train"),
        *("--validation", labels / "validation", "--out", out),
        depends_on=[labels / split / "manifest.json" for split in ("train", "validation")],
        **settings | fields,
    )
    return out


def train(commands: Commands) -> list[Path]:
    """Trains the policies of every price and the baselines."""
    first = commands.args.seed
    seeds = range(first, first + commands.args.seeds)
    policies = [train_one(commands, f"price-{seed}", seed) for seed in seeds]
    if verifier := commands.args.verifier:
        judge = {"method": "flashthink", "verifier": verifier}
        policies.append(train_one(commands, "flashthink", first, **judge))
    if "grid" in commands.args.studies:
        return policies + [tuned(commands, name) for name in BASELINES]
    return policies + [train_one(commands, name, first, method=name) for name in BASELINES]


def tuned(commands: Commands, name: str) -> Path:
    """A baseline of the passes and rates with the largest area on validation; prints the curve."""
    args, out = commands.args, commands.out / "grid" / name
    validation = Judged(commands.labels / "validation", args.base, states=commands.out / "states")
    plain = train_one(commands, name, args.seed, method=name)
    settings = json.loads((plain / "run.json").read_text("utf-8"))["settings"]
    places = {f"{settings['num_train_epochs']:g} passes": plain}
    for passes, factor in itertools.product(PASSES, RATES):
        rates = {one: factor * settings[one] for one in ("learning_rate", "head_learning_rate")}
        tried, asked = f"{name}-{passes}-{factor:g}", {"num_train_epochs": passes, **rates}
        policy = train_one(commands, tried, args.seed, method=name, **asked)
        places[f"{passes} passes, {factor:g} of the rates"] = policy
    areas = {what: validation_area(validation, policy) for what, policy in places.items()}
    for what, area in areas.items():
        print(f"{name}, {what}: area on validation {100 * area:.2f} %", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "numbers.json").write_text(json.dumps(areas, indent=1), "utf-8")
    return places[max(areas, key=areas.__getitem__)]


def validation_area(validation: Judged, policy: Path) -> float:
    """The area under a classifier's frontier on the traces that choose."""
    (use, *_), table = parse_policies([str(policy)]), validation.split.table
    said = validation.said(use).probabilities()
    free = np.arange(said.shape[1]) < table.last[:, None]
    rules = []
    for value in family_thresholds(LEARN_STOP, np.where(free, said, np.nan)):
        outcome = replay(table, said, value)
        rules.append(Rule(use.method, outcome, value, "threshold", validation=(outcome,)))
    found, _ = frontiers({use.method: rules}, table, table, replicates=1)
    return float(found["validation_area"][0])


def studies(commands: Commands) -> None:
    """Each study's policies, each compared on its own on the first set of test problems."""
    args, limit = commands.args, commands.sets["train"]
    wanted: dict[str, dict[str, Any]] = {}
    if "curve" in args.studies:
        wanted |= {f"curve/{n}": {"limit": n} for n in CURVE if n < limit}
    if "tails" in args.studies:
        wanted |= {f"tails/{name}": TAILS[name] for name in args.tails}
    if "paper" in args.studies:
        wanted["paper/annealed"] = PAPER
    for name, fields in wanted.items():
        policy = train_one(commands, name, args.seed, **fields)
        compare_one(commands, f"studies/{name}", "gsm8k", [policy], [])


def compare_one(
    commands: Commands, out: str, test: str, policies: Sequence[Path], rules: Sequence[str]
) -> None:
    """Compares policies and rules on a set of test problems, chosen on validation."""
    labels, kept = commands.labels, commands.out / out
    beside = [f"{test}-{prompt}" for prompt in commands.args.beside]
    manifests = [labels / name / "manifest.json" for name in ("validation", test, *beside)]
    commands.run(
        out,
        *("ospruner", "compare", labels / test, *policies, *rules),
        *("--choose-on", labels / "validation", "--base", commands.args.base),
        *("--prices", "all", "--states", commands.out / "states", "--out", kept),
        *("--json", kept / "numbers.json"),
        depends_on=[*(policy / "run.json" for policy in policies), *manifests],
        rewards_at=GAPS,
        beside=f"[{', '.join(str(labels / name) for name in beside)}]" if beside else None,
        train=labels / "train",
        benchmark=test,
    )


def compare(commands: Commands, policies: Sequence[Path]) -> None:
    """Whole methods, and rules at fixed thresholds, on the test problems."""
    free = ("entropy:0.4", "deer:0.95", "agreement:2", "agreement:3", "es-cot:3")
    for test in commands.tests:
        compare_one(commands, f"frontier/{test}", test, policies, commands.args.rules)
        compare_one(commands, f"replay/{test}", test, policies, free)


def promises(commands: Commands, policy: Path) -> None:
    """What validation can promise of a policy, and whether the first test problems keep it."""
    labels, out = commands.labels, commands.out / "promises"
    more: dict[str, Any] = {"base": str(commands.args.base), "states": commands.out / "states"}
    found = {}
    for most in LOSSES:
        made = calibrate(policy, str(labels / "validation"), most, **more)
        found[f"{most:g}"] = said = {**dataclasses.asdict(made), "kept": None}
        if made.value is not None:
            test = str(labels / commands.tests[0])
            frame = compare_labels(test, [f"{policy}@.5"], prices=[made.value], **more).frame
            (full, ours), saved = frame["accuracy"][:2], frame["reduction"][1]
            said |= {
                "test_loss": full - ours,
                "test_saved": saved,
                "kept": bool(full - ours <= most),
            }
        print(
            f"promise of {100 * most:g} points: {made.told(most, 0.95)}; {said['kept']}", flush=True
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / "numbers.json").write_text(json.dumps(found, indent=1), "utf-8")


def seconds(commands: Commands) -> None:
    """Seconds, in vLLM and in transformers; and what each engine does a second while it labels."""
    args, policy, labels = (
        commands.args,
        commands.out / f"policies/price-{commands.args.seed}",
        commands.labels / "gsm8k",
    )
    for name in ("served", "engines"):
        (commands.out / name).mkdir(exist_ok=True)
    commands.run(
        "served gsm8k",
        *("serve.py", "--policy", policy, "--labels", labels, "--price", 1e-3),
        *("--dtype", args.dtype, "--tokens", args.max_tokens + 64),
        *("--requests", 64, "--json", commands.out / "served" / "numbers.json"),
        depends_on=[policy / "run.json"],
    )
    online = commands.out / "online"
    commands.run(
        "online gsm8k",
        *("ospruner", "compare", labels, policy, "--online", "--base", args.base),
        *("--limit", 16, "--samples", 1, "--seed", args.seed),
        *("--out", online, "--json", online / "numbers.json"),
        depends_on=[labels / "manifest.json", policy / "run.json"],
        batch_problems=8,
    )
    file = args.files and args.files / "gsm8k_train.jsonl.gz"
    asked = [file] if file else ["gsm8k", "--split", "train"]
    commands.run(
        "engines",
        *("engines.py", "--base", args.base, "--dataset", *asked, "--format", args.format),
        *("--prompt", args.prompt, "--limit", 32, "--seed", args.seed),
        *("--arms", *ARMS, "--json", commands.out / "engines" / "numbers.json"),
    )


def shape_of(labels: Path) -> dict[str, Any]:
    """How the traces of a set of labels run: lengths, and when their answers are right."""
    rows = read_labels(labels)
    ends = [np.array(row) for row in rows["step_ends"]]
    right = [np.array([grade or 0.0 for grade in row]) for row in rows["forced_correct"]]
    wrong = [(r >= 0.5).any() and r[-1] < 0.5 for r in right]
    pairs = list(zip(ends, right, strict=True))
    first = [e[r >= 0.5][0] / e[-1] for e, r in pairs if (r >= 0.5).any()]
    taken = np.array([[r[e <= share * e[-1]][-1:].sum() for share in FRACTIONS] for e, r in pairs])
    steps = np.concatenate([np.diff(row, prepend=0) for row in ends])

    def tenths(values: Sequence[float] | np.ndarray) -> dict[str, float]:
        return {str(q): float(np.quantile(values, q)) for q in TENTHS} if len(values) else {}

    return {
        "right_then_wrong": float(np.mean(wrong)),
        "fractions": list(FRACTIONS),
        "accuracy_by_fraction": taken.mean(0).tolist(),
        "first_right_fraction": tenths(first),
        "steps_per_trace": tenths([len(row) for row in ends]),
        "tokens_per_trace": tenths([row[-1] for row in ends]),
        "tokens_per_step": tenths(steps),
        "closed": float(np.mean([ended == "natural" for ended in rows["ended"]])),
    }


def collect(commands: Commands) -> dict[str, Any]:
    """Everything that was measured, as one JSON object."""
    out, labels = commands.out, commands.labels
    manifest = json.loads((labels / "train" / "manifest.json").read_text("utf-8"))
    records = {name: vars(read_provenance(labels / name)) for name in commands.sets}
    found: dict[str, Any] = {
        "commands": commands.kept,
        "seed": commands.args.seed,
        "label_settings": manifest["settings"],
        "problems": {n: stats_of(labels / n) | shape_of(labels / n) for n in commands.sets},
        "made_by": {name: {key: of[key] for key in MADE_BY} for name, of in records.items()},
    }
    for file in sorted(out.glob("*/**/numbers.json")):
        kind, *name = file.relative_to(out).parts[:-1]
        numbers = json.loads(file.read_text("utf-8"))
        if kind in ("served", "engines", "promises"):
            found[kind] = numbers
        else:
            found.setdefault(kind, {})["/".join(name) or "gsm8k"] = numbers
    return found


def main() -> None:
    """Runs everything that is not yet there, and writes all numbers as one JSON object."""
    parser = timing.options(__doc__)
    parser.set_defaults(seed=1)
    parser.add_argument("--base", required=True, help="folder or Hub id of the model")
    parser.add_argument("--out", type=Path, default=Path("runs/real-model"))
    parser.add_argument("--files", type=Path, help="folder of gsm8k_train.jsonl.gz and the others")
    parser.add_argument(
        "--problems",
        type=int,
        nargs=4,
        default=[800, 200, 300, 60],
        metavar=("TRAIN", "VALIDATION", "GSM8K", "MATH"),
        help="how many of each set",
    )
    parser.add_argument("--seeds", type=int, default=1, help="of training, for our policy")
    parser.add_argument(
        "--studies", nargs="+", choices=("curve", "tails", "paper", "grid"), default=[]
    )
    parser.add_argument("--tails", nargs="+", choices=TAILS, default=[*TAILS], help="of the study")
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
    commands = Commands(timing.parse(parser))
    label(commands)
    if commands.args.only != "labels":
        policies = train(commands)
        compare(commands, policies)
        promises(commands, policies[0])
        studies(commands)
    if commands.args.only is None:
        seconds(commands)
    timing.print_last_line(collect(commands), commands.args.json)


if __name__ == "__main__":
    main()
