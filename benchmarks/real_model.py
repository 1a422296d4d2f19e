"""Labels, trains and compares on a pretrained model, by one command.

    python benchmarks/real_model.py --base FOLDER_OR_ID --out runs/real-model [--files DIR]
        [--share 0.25] [--dtype bfloat16] [--engine vllm] [--only-labels] [--json FILE]
    python benchmarks/real_model.py --base runs/thinker --out runs/thinks --files DIR
        --format deepseek-r1 --prompt default --exclude runs/thinker/problems.jsonl

The first form is for a model without thinking markers. The second is for one that
`docs/examples/thinker.py` has taught to think: no problem that it learnt is asked.

These commands run one after the other, each as one would type it; all of them are printed:

    ospruner label        GSM8K's train problems (800 to train on, 200 for validation), 300 of its
                          test problems, 60 of MATH-500
    ospruner train        one policy of every price, and the baselines on the same pass of the base
    ospruner compare      whole methods and fixed thresholds; --online, seconds in transformers
    benchmarks/serve.py   seconds in vLLM; engines.py, what each engine labels a second

A command that was stopped goes on when this one runs again; finished evaluations are not repeated
while their labels and policies are the same. Seconds are added up over all runs. `--share` takes
that share of each number of problems; a larger one later goes on from the smaller. The base runs
once over each set of labels: its states are kept for all methods and evaluations (`--states`).

Traces are sampled at a temperature of 0.7 from the whole vocabulary: on a CPU, top-p would sort its
152,000 logits for each row and token, a fifth of the time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timing

from ospruner.provenance import hash_files, read_provenance
from ospruner.train.labels.statistics import stats_of

PROBLEMS = {
    "train": ("gsm8k", "train[:6000]", "gsm8k_train", 800),
    "validation": ("gsm8k", "train[6000:]", "gsm8k_train", 200),
    "gsm8k": ("gsm8k", "test", "gsm8k_test", 300),
    "math500": ("math500", None, "math500", 60),
}
"""Of each set of labels: dataset, split, local file, number of problems."""

GAPS = "2e-3,1e-3,3e-4,1e-4"
BASELINES = ("probe", "convergence", "final-answer")
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

    def count(self, number: int) -> int:
        """That share of a number of problems which was asked for."""
        return max(1, round(self.args.share * number))

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
    """Labels the four sets of problems."""
    args = commands.args
    for name, (dataset, split, file, count) in PROBLEMS.items():
        commands.run(
            f"label {name}",
            *("ospruner", "label", "--base", args.base, "--dataset", dataset),
            *("--out", commands.labels / name),
            engine=args.engine,
            format=args.format,
            prompt=args.prompt,
            temperature=0.7,
            top_p=1,
            chunk=160,
            max_thinking_tokens=args.max_tokens,
            seed=args.seed,
            batch_size=96,
            dtype=args.dtype,
            limit=commands.count(count),
            split=split,
            files=args.files and args.files / f"{file}.jsonl.gz",
            exclude=args.exclude,
        )


def train(commands: Commands) -> None:
    """Trains the policy of every price and the baselines, on one pass of the base each."""
    labels = commands.labels
    for name in ("price", *BASELINES):
        commands.run(
            f"train {name}",
            *("ospruner", "train", "--labels", labels / "train"),
            *("--validation", labels / "validation", "--out", commands.out / "policies" / name),
            depends_on=[labels / split / "manifest.json" for split in ("train", "validation")],
            base=commands.args.base,
            num_train_epochs=8,
            learning_rate=1e-5,
            head_learning_rate=1e-4,
            batch_size=16,
            seed=commands.args.seed,
            states=commands.out / "states",
            method=None if name == "price" else name,
        )


def compare(commands: Commands) -> None:
    """Whole methods, and rules at fixed thresholds, on the test problems."""
    labels, policies = commands.labels, commands.out / "policies"
    manifests = [labels / name / "manifest.json" for name in PROBLEMS]
    inputs = [*sorted(policies.glob("*/run.json")), *manifests]
    free = ("entropy:0.4", "deer:0.95", "agreement:2", "agreement:3", "es-cot:3")
    for name in ("gsm8k", "math500"):
        for kind, rules in (("frontier", ("rules",)), ("replay", free)):
            out = commands.out / kind / name
            commands.run(
                f"{kind} {name}",
                *("ospruner", "compare", labels / name, *sorted(policies.iterdir()), *rules),
                *("--choose-on", labels / "validation", "--base", commands.args.base),
                *("--prices", "all", "--states", commands.out / "states", "--out", out),
                *("--json", out / "numbers.json"),
                depends_on=inputs,
                rewards_at=GAPS,
                train=labels / "train",
                benchmark=name,
            )


def seconds(commands: Commands) -> None:
    """Seconds, in vLLM and in transformers; and what each engine does a second while it labels."""
    args, policy, labels = commands.args, commands.out / "policies/price", commands.labels / "gsm8k"
    for name in ("served", "engines"):
        (commands.out / name).mkdir(exist_ok=True)
    commands.run(
        "served gsm8k",
        *("serve.py", "--policy", policy, "--labels", labels, "--price", 1e-3),
        *("--dtype", args.dtype, "--tokens", args.max_tokens + 64),
        *("--requests", commands.count(64), "--json", commands.out / "served" / "numbers.json"),
        depends_on=[policy / "run.json"],
    )
    online = commands.out / "online"
    commands.run(
        "online gsm8k",
        *("ospruner", "compare", labels, policy, "--online", "--base", args.base),
        *("--limit", commands.count(16), "--samples", 1, "--seed", args.seed),
        *("--out", online, "--json", online / "numbers.json"),
        depends_on=[labels / "manifest.json", policy / "run.json"],
        batch_problems=8,
    )
    file = args.files and args.files / "gsm8k_train.jsonl.gz"
    asked = [file] if file else ["gsm8k", "--split", "train"]
    commands.run(
        "engines",
        *("engines.py", "--base", args.base, "--dataset", *asked, "--format", args.format),
        *("--prompt", args.prompt, "--limit", commands.count(32), "--seed", args.seed),
        *("--arms", *ARMS, "--json", commands.out / "engines" / "numbers.json"),
    )


def collect(commands: Commands) -> dict[str, Any]:
    """Everything that was measured, as one JSON object."""
    out, labels = commands.out, commands.labels
    manifest = json.loads((labels / "train" / "manifest.json").read_text("utf-8"))
    records = {name: vars(read_provenance(labels / name)) for name in PROBLEMS}
    found: dict[str, Any] = {
        "commands": commands.kept,
        "seed": commands.args.seed,
        "label_settings": manifest["settings"],
        "problems": {name: stats_of(labels / name) for name in PROBLEMS},
        "made_by": {name: {key: of[key] for key in MADE_BY} for name, of in records.items()},
    }
    for file in sorted(out.glob("*/**/numbers.json")):
        kind, *name = file.relative_to(out).parts[:-1]
        numbers = json.loads(file.read_text("utf-8"))
        if kind in ("served", "engines"):
            found[kind] = numbers
        else:
            found.setdefault(kind, {})[name[0] if name else "gsm8k"] = numbers
    return found


def main() -> None:
    """Runs everything that is not yet there, and writes all numbers as one JSON object."""
    parser = timing.options(__doc__)
    parser.set_defaults(seed=1)
    parser.add_argument("--base", required=True, help="folder or Hub id of the model")
    parser.add_argument("--out", type=Path, default=Path("runs/real-model"))
    parser.add_argument("--files", type=Path, help="folder of gsm8k_train.jsonl.gz and the others")
    parser.add_argument("--share", type=float, default=1.0, help="of the problems")
    parser.add_argument("--only-labels", action="store_true", help="leave out what follows them")
    parser.add_argument("--max-tokens", type=int, default=1000, help="of a trace's thinking")
    parser.add_argument("--engine", default="vllm", help="that labels: vllm or transformers")
    parser.add_argument("--dtype", default="auto", help="of the base: bfloat16 where it is fast")
    parser.add_argument("--format", default="plain", help="the base's reasoning format")
    parser.add_argument("--prompt", default="check", help="how problems are put")
    parser.add_argument("--exclude", type=Path, help="a file of problems to leave out: learnt ones")
    commands = Commands(timing.parse(parser))
    label(commands)
    if not commands.args.only_labels:
        train(commands)
        compare(commands)
        seconds(commands)
    timing.print_last_line(collect(commands), commands.args.json)


if __name__ == "__main__":
    main()
