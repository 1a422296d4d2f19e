"""Makes the small policy that ships with the package, `ospruner.demo.POLICY`.

`python -m ospruner.demo.policy_recipe OUT` labels and trains as `ospruner demo` does, and writes
into `OUT/policy` what such a policy is, without this machine's paths. Its base is the reasoner in
the folder beside it; its code is the installed package's.
"""

import argparse
import dataclasses
from functools import partial
from pathlib import Path

from rich.console import Console

from ospruner.eval.report.summary import results_table
from ospruner.eval.results import RESULTS_FILE, Results
from ospruner.hub_cards.staging import copy_files, empty_folder, scrubbed, write_json
from ospruner.progress import PhaseBars
from ospruner.provenance import read_object, read_provenance, without_paths, write_provenance

from . import REASONER
from .demo import STANDARD, label_split, train_config, train_one
from .jobs import Workers
from .problems import Split
from .shipped import write_split

FILES = (
    *("config.json", "generation_config.json", "model.safetensors", RESULTS_FILE),
    *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
)


def make_policy(out: Path, seed: int, console: Console) -> Path:
    """Labels, trains and writes the policy; a stopped run continues.

    Args:
        out: Folder of the run.
        seed: Of problems, sampling and training.
        console: Where to draw bars.

    Returns:
        The policy's folder.
    """
    splits: tuple[Split, ...] = ("train", "validation")
    config = train_config(out, STANDARD, seed)
    with Workers(len(splits)) as workers, PhaseBars(console) as bars:
        for split in splits:
            write_split(out, split, vars(STANDARD)[split], seed)
        workers.run({one: partial(label_split, out, one, seed) for one in splits}, bars)
        workers.run({"policy": partial(train_one, out, config)}, bars)
    return ship(Path(str(config.output_dir)), out / "policy")


def ship(trained: Path, policy: Path) -> Path:
    """Writes a trained policy of the reasoner as it ships, and returns its folder."""
    empty_folder(policy)
    copy_files(trained, policy, FILES)
    values = read_object(policy / "config.json") | {
        "base_model_name_or_path": f"../{REASONER.name}"
    }
    for gone in ("auto_map", "_name_or_path"):
        values.pop(gone, None)
        values["text_config"].pop(gone, None)
    write_json(policy / "config.json", values)
    record = read_provenance(trained)
    told = {"command": without_paths(record.command), "details": scrubbed(record.details)}
    write_provenance(policy, dataclasses.replace(record, base_model=REASONER.name, **told))
    return policy


def main() -> None:
    """Makes the policy that ships with the package, in some minutes on a CPU."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", type=Path, help="Folder of the run.")
    parser.add_argument("--seed", type=int, default=0, help="Of problems, sampling and training.")
    asked = parser.parse_args()
    console = Console()
    policy = make_policy(asked.out, asked.seed, console)
    results = Results.read(policy / RESULTS_FILE)
    console.print(results_table(results.frame, f"{results.dataset}: {results.setting}"))
    console.print(f"The policy: {policy}")


if __name__ == "__main__":
    main()
