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
    ospruner compare      whole methods, and rules at fixed thresholds, on both test sets
    benchmarks/serve.py   in vLLM, on the first test problems: seconds
    ospruner compare --online   the same in transformers
    benchmarks/engines.py what each engine does a second on the training problems

A command that was stopped goes on when this one runs again; finished evaluations are not repeated
while their labels and policies are the same. Seconds are added up over all runs. `--share` takes
that share of each number of problems; a larger one later goes on from the smaller. The base runs
once over each set of labels: its states are kept for all methods and evaluations (`--states`).

Traces are sampled at a temperature of 0.7 from the whole vocabulary: on a CPU, top-p would sort its
152,000 logits for each row and token, a fifth of the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timing import environment, print_last_line

from ospruner.provenance import read_provenance
from ospruner.train.labels.summary import stats_of

PROBLEMS = {
    "train": ("gsm8k", "train[:6000]", "gsm8k_train", 800),
    "validation": ("gsm8k", "train[6000:]", "gsm8k_train", 200),
    "gsm8k": ("gsm8k", "test", "gsm8k_test", 300),
    "math500": ("math500", None, "math500", 60),
}
"""Of each set of labels: dataset, split, local file, number of problems."""

TESTS = ("gsm8k", "math500")
OURS = ("--prices", "1e-5,1e-2")
GAPS = "2e-3,1e-3,3e-4,1e-4"
BASELINES = ("probe", "convergence", "final-answer")
SEED = 1
ARMS = ("transformers:float32", "transformers:bfloat16", "vllm:float32", "vllm:bfloat16")
MADE_BY = ("git_commit", "git_modified", "created_utc", "data_hash", "packages")


@dataclass
class Commands:
    """Runs `ospruner` commands, and keeps what each has cost.

    Attributes:
        out: folder of everything.
        base: the base, as each command is given it.
        seed: of sampling and training.
        max_tokens: a trace's thinking tokens at the most.
        dtype: what the base computes in while it writes.
        engine: that labels.
        format: the base's reasoning format.
        prompt: how problems are put.
        kept: by name, each command with its inputs, its end and its seconds.
    """

    out: Path
    base: str
    seed: int
    max_tokens: int
    dtype: str
    engine: str
    format: str
    prompt: str
    kept: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.file.is_file():
            self.kept = json.loads(self.file.read_text("utf-8"))

    @property
    def file(self) -> Path:
        """Where `kept` outlives this process."""
        return self.out / "commands.json"

    def run(
        self,
        name: str,
        words: Sequence[object],
        depends_on: Sequence[Path] = (),
        script: str | None = None,
    ) -> None:
        """Runs one command, unless it has finished with the same words and inputs.

        Args:
            name: of its entry in `commands.json`.
            words: what follows `ospruner`.
            depends_on: files whose content the command reads.
            script: a script of this folder that runs in place of `ospruner`.

        Raises:
            SystemExit: it failed.
        """
        texts = [str(word) for word in words]
        said = shlex.join(["ospruner", *texts])
        program = ["-m", "ospruner.cli"]
        if script is not None:
            said = shlex.join(["python", f"benchmarks/{script}", *texts])
            program = [str(Path(__file__).resolve().parent / script)]
        inputs = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in depends_on}
        before = self.kept.get(name, {})
        same = before.get("command") == said and before.get("inputs") == inputs
        if same and before.get("finished"):
            return
        print(f"$ {said}", flush=True)
        start = time.monotonic()
        code = subprocess.run([sys.executable, *program, *texts]).returncode
        goes_on = same or not depends_on  # a larger share adds to what a smaller one took
        earlier = before.get("seconds", 0.0) if goes_on else 0.0
        self.kept[name] = {
            "command": said,
            "inputs": inputs,
            "finished": code == 0,
            "seconds": earlier + time.monotonic() - start,
        }
        self.file.write_text(json.dumps(self.kept, indent=1), "utf-8")
        if code:
            raise SystemExit(f"{said}: exit status {code}; run this again to go on")


def label(commands: Commands, files: Path | None, exclude: Path | None, share: float) -> None:
    """Labels the four sets of problems."""
    for name, (dataset, split, file, count) in PROBLEMS.items():
        words: list[object] = ["label", "--base", commands.base, "--dataset", dataset]
        words += ["--out", commands.out / "labels" / name]
        fields: dict[str, object] = {"engine": commands.engine, "format": commands.format}
        fields |= {"prompt": commands.prompt, "temperature": 0.7, "top_p": 1, "chunk": 160}
        fields |= {"max_thinking_tokens": commands.max_tokens, "seed": commands.seed}
        fields |= {"batch_size": 96, "dtype": commands.dtype, "limit": max(1, round(share * count))}
        fields |= {} if split is None else {"split": split}
        fields |= {} if files is None else {"files": files / f"{file}.jsonl.gz"}
        fields |= {} if exclude is None else {"exclude": exclude}
        commands.run(f"label {name}", [*words, *_set(fields)])


def _set(fields: Mapping[str, object]) -> list[str]:
    """Fields as the command line takes them."""
    return [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]


def train(commands: Commands) -> Path:
    """Trains the policy of every price and the baselines, on one pass of the base each."""
    policies = commands.out / "policies"
    _train(commands, "price", policies, {})
    for method in BASELINES:
        _train(commands, method, policies, {"method": method})
    return policies


def _train(commands: Commands, name: str, folder: Path, fields: Mapping[str, object]) -> None:
    labels = commands.out / "labels"
    inputs = [labels / split / "manifest.json" for split in ("train", "validation")]
    words: list[object] = ["train", "--labels", labels / "train", "--validation"]
    words += [labels / "validation", "--out", folder / name]
    shared = {"base": commands.base, "num_train_epochs": 8, "learning_rate": 1e-5}
    shared |= {"head_learning_rate": 1e-4, "batch_size": 16, "seed": commands.seed}
    shared |= {"states": commands.out / "states", **fields}
    commands.run(f"train {name}", [*words, *_set(shared)], inputs)


def compare(commands: Commands, policies: Path) -> None:
    """Whole methods, and rules at fixed thresholds, on the test problems."""
    labels = commands.out / "labels"
    validation, records = labels / "validation", sorted(policies.glob("*/run.json"))
    free = ("entropy:0.4", "deer:0.95", "agreement:2", "agreement:3", "es-cot:3")
    for name in TESTS:
        inputs = [*records, validation / "manifest.json", labels / name / "manifest.json"]
        for kind, rules in (("frontier", ("rules",)), ("replay", free)):
            out = commands.out / kind / name
            words: list[object] = ["compare", labels / name, *sorted(policies.iterdir()), *rules]
            words += ["--choose-on", validation, "--base", commands.base, "--prices", "all"]
            words += ["--states", commands.out / "states", "--out", out]
            words += ["--json", out / "numbers.json"]
            fields = {"rewards_at": GAPS, "train": labels / "train", "benchmark": name}
            commands.run(f"{kind} {name}", [*words, *_set(fields)], inputs)


def online(commands: Commands, policies: Path, share: float) -> None:
    """Seconds, by real generation on the first labelled test problems."""
    labels, out = commands.out / "labels" / "gsm8k", commands.out / "online"
    words: list[object] = ["compare", labels, policies / "price", "--online", "--base"]
    words += [commands.base, "--limit", max(1, round(16 * share)), "--out", out]
    words += ["--json", out / "numbers.json"]
    fields = {"samples": 1, "batch_problems": 8, "seed": commands.seed}
    inputs = [labels / "manifest.json", *policies.glob("price/run.json")]
    commands.run("online gsm8k", [*words, *_set(fields)], inputs)


def served(commands: Commands, policies: Path, share: float) -> None:
    """Seconds in vLLM: plain, and with the policy at a middle price, on test prompts."""
    labels = commands.out / "labels" / "gsm8k"
    (commands.out / "served").mkdir(exist_ok=True)
    words: list[object] = ["--policy", policies / "price", "--labels", labels]
    words += ["--price", 1e-3, "--dtype", commands.dtype, "--tokens", commands.max_tokens + 64]
    words += ["--requests", max(1, round(64 * share))]
    words += ["--json", commands.out / "served" / "numbers.json"]
    commands.run("served gsm8k", words, sorted(policies.glob("price/run.json")), "serve.py")


def engines(commands: Commands, files: Path | None, share: float) -> None:
    """What each engine does a second, on the first training problems."""
    (commands.out / "engines").mkdir(exist_ok=True)
    words: list[object] = ["--base", commands.base, "--dataset"]
    words += ["gsm8k", "--split", "train"] if files is None else [files / "gsm8k_train.jsonl.gz"]
    words += ["--format", commands.format, "--prompt", commands.prompt]
    words += ["--limit", max(1, round(32 * share)), "--seed", commands.seed, "--arms", *ARMS]
    words += ["--json", commands.out / "engines" / "numbers.json"]
    commands.run("engines", words, script="engines.py")


def collect(commands: Commands) -> dict[str, Any]:
    """Everything that was measured, as one JSON object."""
    out, found = commands.out, dict[str, Any](commands=commands.kept, seed=commands.seed)
    manifest = json.loads((out / "labels" / "train" / "manifest.json").read_text("utf-8"))
    found["label_settings"] = manifest["settings"]
    found["problems"] = {name: stats_of(out / "labels" / name) for name in PROBLEMS}
    found["made_by"] = {}
    for name in PROBLEMS:
        record = dataclasses.asdict(read_provenance(out / "labels" / name))
        found["made_by"][name] = {key: record[key] for key in MADE_BY}
    for kind in ("frontier", "replay", "online"):
        for file in sorted((out / kind).glob("**/numbers.json")):
            name = file.parent.name if kind != "online" else "gsm8k"
            found.setdefault(kind, {})[name] = json.loads(file.read_text("utf-8"))
    for kind in ("served", "engines"):
        if (file := out / kind / "numbers.json").is_file():
            found[kind] = json.loads(file.read_text("utf-8"))
    return {**found, **environment()}


def main() -> None:
    """Runs everything that is not yet there, and writes all numbers as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="folder or Hub id of the model")
    parser.add_argument("--out", type=Path, default=Path("runs/real-model"))
    parser.add_argument("--files", type=Path, help="folder of gsm8k_train.jsonl.gz and the others")
    parser.add_argument("--share", type=float, default=1.0, help="of the problems")
    parser.add_argument("--only-labels", action="store_true", help="leave out what follows them")
    parser.add_argument("--max-tokens", type=int, default=1000, help="of a trace's thinking")
    parser.add_argument("--engine", default="vllm", help="that labels: vllm or transformers")
    parser.add_argument(
        "--dtype", default="auto", help="of the base: bfloat16 where the CPU has units for it"
    )
    parser.add_argument("--format", default="plain", help="the base's reasoning format")
    parser.add_argument("--prompt", default="check", help="how problems are put")
    parser.add_argument("--exclude", type=Path, help="a file of problems to leave out: learnt ones")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    commands = Commands(
        out=args.out,
        base=args.base,
        seed=args.seed,
        max_tokens=args.max_tokens,
        dtype=args.dtype,
        engine=args.engine,
        format=args.format,
        prompt=args.prompt,
    )
    label(commands, args.files, args.exclude, args.share)
    if not args.only_labels:
        policies = train(commands)
        compare(commands, policies)
        served(commands, policies, args.share)
        online(commands, policies, args.share)
        engines(commands, args.files, args.share)
    print_last_line(collect(commands), args.json)


if __name__ == "__main__":
    main()
