"""For how many seeds the demo's claims hold.

    python benchmarks/demo_seeds.py [--seeds 0-9] [--size standard] [--out runs/demo-seeds]
        [--json FILE]

Each seed is an `ospruner demo` of its own, from nothing; a stopped one continues, and those that
are finished are only read. `--show FILE` prints the table again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from timing import environment, options, parse, print_last_line

from ospruner.eval.results import RESULTS_FILE, Results
from ospruner.eval.text import markdown_table


def about_of(folder: Path, seed: int, size: str) -> dict[str, Any]:
    """What one seed's demo says of itself; it is run where it is not finished."""
    if not (folder / "side_by_side.json").is_file() or not (folder / RESULTS_FILE).is_file():
        command = [sys.executable, "-m", "ospruner.cli", "demo", "--out", str(folder)]
        command += ["--seed", str(seed), *([] if size == "standard" else [f"--{size}"])]
        subprocess.run(command, check=True)
    about = Results.read(folder / RESULTS_FILE).about
    if (about["run"]["seed"], about["run"]["settings"]["name"]) != (seed, size):
        raise SystemExit(f"{folder} holds a demo of another seed or size: choose another --out")
    return dict(about)


def markdown(found: Mapping[str, Mapping[str, bool]]) -> str:
    """For how many seeds each claim held."""
    frame = pd.DataFrame(found).T  # a row a seed
    rows = [[str(name), f"{held.sum()} of {held.count()}"] for name, held in frame.items()]
    together = sum(all(claims.values()) for claims in found.values())
    return markdown_table(
        ["claim", "seeds"], [*rows, ["all of them", f"{together} of {len(found)}"]]
    )


def main() -> None:
    """Runs the demos, prints how often each claim held, and the numbers as one JSON object."""
    parser = options(__doc__)
    parser.add_argument("--seeds", default="0-9", help="FIRST-LAST")
    parser.add_argument("--size", default="standard", choices=("quick", "standard"))
    parser.add_argument("--out", type=Path, default=Path("runs/demo-seeds"))
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of such a file")
    args = parse(parser)
    if args.show:
        print(markdown(json.loads(args.show.read_text())["seeds"]))
        return
    first, last = map(int, args.seeds.split("-"))
    about = {
        str(seed): about_of(args.out / f"{args.size}-seed{seed}", seed, args.size)
        for seed in range(first, last + 1)
    }
    found = {
        seed: {claim["claim"]: claim["holds"] for claim in one["claims"]}
        for seed, one in about.items()
    }
    print(markdown(found))
    result: dict[str, Any] = {
        "size": args.size,
        "settings": about[str(first)]["run"]["settings"],
        "seeds": found,
        "all": sum(all(claims.values()) for claims in found.values()),
        "made_by": {
            seed: {name: one["run"][name] for name in ("git_commit", "created_utc")}
            for seed, one in about.items()
        },
    }
    print_last_line(result | environment(), args.json)


if __name__ == "__main__":
    main()
