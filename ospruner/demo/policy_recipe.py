"""Makes the small policy that ships with the package, `ospruner.demo.POLICY`.

`python -m ospruner.demo.policy_recipe RUN`, after `ospruner demo --out RUN`, writes into
`RUN/shipped` the policy that the demo trained, without this machine's paths. Its base is the
reasoner in the folder beside it; its code is the installed package's.
"""

import argparse
import dataclasses
from pathlib import Path

from rich.console import Console

from ospruner.eval.report.summary import results_table
from ospruner.eval.results import RESULTS_FILE, Results
from ospruner.hub_cards.staging import copy_files, empty_folder, scrubbed, write_json
from ospruner.provenance import read_object, read_provenance, without_paths, write_provenance

from . import REASONER
from .demo import size_and_seed, train_config

FILES = (
    *("config.json", "generation_config.json", "model.safetensors", RESULTS_FILE),
    *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
)


def ship(run: Path) -> Path:
    """Writes the policy of a demo's folder as it ships, into `run/shipped`, and returns that."""
    trained, policy = Path(str(train_config(run, *size_and_seed(run)).output_dir)), run / "shipped"
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
    """Writes a demo's policy as it ships with the package, and prints what it does."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run", type=Path, help="Folder of `ospruner demo`.")
    policy = ship(parser.parse_args().run)
    results, console = Results.read(policy / RESULTS_FILE), Console()
    console.print(results_table(results.frame, f"{results.dataset}: {results.setting}"))
    console.print(f"The policy: {policy}")


if __name__ == "__main__":
    main()
