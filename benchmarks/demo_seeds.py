"""For how many seeds the demo's claims hold.

    python benchmarks/demo_seeds.py [--seeds 10-19] [--size standard] [--out runs/demo-seeds]
        [--json FILE]

Each seed is an `ospruner demo` of its own; finished ones are only read, a stopped one continues.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import timing

from ospruner.eval.results import RESULTS_FILE, Results


def about_of(folder: Path, seed: int, size: str) -> dict[str, Any]:
    """What one seed's demo says of itself; it is run where it is not finished."""
    results = folder / "report" / RESULTS_FILE
    if not all(file.is_file() for file in (folder / "side_by_side.json", results)):
        command = [sys.executable, "-m", "ospruner.cli", "demo", "--out", str(folder)]
        command += ["--seed", str(seed), *([] if size == "standard" else [f"--{size}"])]
        subprocess.run(command, check=True)
    about = Results.read(results).about
    if (about["run"]["seed"], about["run"]["settings"]["name"]) != (seed, size):
        raise SystemExit(f"{folder} holds a demo of another seed or size: choose another --out")
    return dict(about)


def main() -> None:
    """Runs the demos, prints how often each claim held, and the numbers as one JSON object."""
    parser = timing.options(__doc__)
    parser.add_argument("--seeds", default="10-19", help="FIRST-LAST")
    parser.add_argument("--size", default="standard", choices=("quick", "standard"))
    parser.add_argument("--out", type=Path, default=Path("runs/demo-seeds"))
    args = timing.parse(parser)
    first, last = map(int, args.seeds.split("-"))
    result: dict[str, Any] = {"size": args.size, "seeds": {}, "made_by": {}}
    for seed in range(first, last + 1):
        about = about_of(args.out / f"{args.size}-seed{seed}", seed, args.size)
        result["seeds"][str(seed)] = about["claims"]
        run = result["made_by"][str(seed)] = about["run"]
        result["settings"] = run["settings"]
    told = pd.concat(pd.DataFrame(claims) for claims in result["seeds"].values())
    print(told.groupby("claim", sort=False)["holds"].agg(["sum", "count"]).to_string())
    timing.print_last_line(result, args.json)


if __name__ == "__main__":
    main()
