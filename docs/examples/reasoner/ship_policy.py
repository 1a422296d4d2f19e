"""Makes the small policy that ships with the package, `ospruner.demo.POLICY`.

`python docs/examples/reasoner/ship_policy.py RUN`, after `ospruner demo --out RUN`, writes into
`RUN/shipped` the policy that the demo trained, without this machine's paths. Its base is the
reasoner in the folder beside it; its code is the installed package's.
"""

import argparse
import dataclasses
from pathlib import Path

from ospruner.demo import REASONER
from ospruner.demo.demo import size_and_seed, train_config
from ospruner.eval.results import RESULTS_FILE
from ospruner.hub_cards.staging import copy_files, empty_folder, scrubbed, write_json
from ospruner.provenance import read_object, read_provenance, without_paths, write_provenance

FILES = (
    *("config.json", "generation_config.json", "model.safetensors", RESULTS_FILE),
    *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
)


def ship(run: Path) -> Path:
    """Writes the policy of a demo's folder as it ships, into `run/shipped`, and returns that."""
    trained, policy = Path(str(train_config(run, *size_and_seed(run)).output_dir)), run / "shipped"
    empty_folder(policy)
    copy_files(trained, policy, FILES)
    here = {"base_model_name_or_path": f"../{REASONER.name}", "calibrations": None}
    values = read_object(policy / "config.json") | here
    for gone in ("auto_map", "_name_or_path", "efforts"):
        values.pop(gone, None)
        values["text_config"].pop(gone, None)
    write_json(policy / "config.json", values)
    record = read_provenance(trained)
    told = {"command": without_paths(record.command), "details": scrubbed(record.details)}
    write_provenance(policy, dataclasses.replace(record, base_model=REASONER.name, **told))
    return policy


def main() -> None:
    """Writes a demo's policy as it ships with the package."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run", type=Path, help="Folder of `ospruner demo`.")
    print(f"The policy: {ship(parser.parse_args().run)}")


if __name__ == "__main__":
    main()
