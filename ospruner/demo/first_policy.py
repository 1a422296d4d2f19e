"""`ospruner app`; without an argument it trains a policy of the embedded reasoner first."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ospruner.app.page import PIP_LINE, open_app, open_source
from ospruner.durable import replace_file
from ospruner.optional import needed
from ospruner.progress import PhaseBars
from ospruner.train.config import StopConfig
from ospruner.train.tail import no_denormals
from ospruner.train.trainer import StopTrainer

from .problems import Split
from .shipped import Reasoner, draw_split

FOLDER = Path("runs/app")
PRICES = [5e-5, 1e-2]
TRACES: dict[Split, int] = {"train": 256, "validation": 64}


def run_app(
    policy: str | None,
    url: str | None,
    revision: str | None,
    console: Console,
    host: str | None = None,
    port: int | None = None,
    in_browser: bool = False,
) -> None:
    """Opens the page for a policy, a server, or the embedded reasoner where neither is given.

    Args:
        policy: Folder or Hub id.
        url: Address of a server of `ospruner serve`.
        revision: Of the policy on the Hub.
        console: Where to say what is done.
        host: See `open_app`.
        port: See `open_app`.
        in_browser: See `open_app`.

    Raises:
        MissingPackageError: Gradio is not installed; nothing was trained.
        ValueError, OSError: As `open_source` and `open_app`.
    """
    needed("gradio", "the page of `ospruner app`", PIP_LINE)
    if policy is None and url is None:
        if revision is not None:
            raise ValueError(f"--revision is {revision!r} without a policy: name the policy, too")
        policy = str(first_policy(FOLDER, console))
    open_app(open_source(policy, url, revision), host, port, in_browser)


@no_denormals()
def first_policy(
    out_dir: Path, console: Console, traces: dict[Split, int] | None = None, seed: int = 0
) -> Path:
    """Labels traces and trains a policy, unless the folder holds one already.

    Args:
        out_dir: Where labels and policy are kept; a stopped run continues.
        console: Where to say what is done.
        traces: How many of each split; None for `TRACES`.
        seed: Of problems, sampling and training.

    Returns:
        The policy's folder.
    """
    policy, finished = out_dir / "policy", out_dir / "finished"
    if finished.is_file():
        console.print(f"The embedded reasoner with the policy in {policy}.")
        return policy
    counts = TRACES if traces is None else traces
    console.print(
        f"First start: a policy for the embedded reasoner is trained on {counts['train']} "
        f"traces; that takes about two minutes on one core, and is kept in {out_dir}. "
        "`ospruner demo` makes a better one: ospruner app runs/demo/policy"
    )
    reasoner = Reasoner()
    for split, count in counts.items():
        with PhaseBars(console, split) as bars:
            problems = draw_split(split, count, seed)
            reasoner.label(problems, out_dir / "labels" / split, seed, bars)
    config = StopConfig(
        str(policy), prices=PRICES, num_train_epochs=8, seed=seed, disable_tqdm=True
    )
    with PhaseBars(console, "train") as bars:
        labels = (out_dir / "labels" / split for split in counts)
        StopTrainer(config, *labels, progress=bars).train()
    replace_file(finished, b"")
    return policy
