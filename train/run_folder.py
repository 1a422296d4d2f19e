"""The folder of a training run: whose it is, and where a stopped run goes on.

run.json             what is trained on what; which policies are saved, and what they do
checkpoint-N/        transformers': weights, optimiser (with the means of weights), place
trainer_state.json   transformers': the log, of a run that has ended
model.safetensors, config.json, provenance.json ...   the policy; of several, in a folder each
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from ospruner.durable import differences, lock_folder, read_checked, refuse_strangers, write_checked

RUN = "run.json"


@contextmanager
def claimed(out: Path, identity: dict[str, Any]) -> Iterator[None]:
    """The run's folder, made this run's alone.

    Raises:
        ValueError: it holds something else, or a run of other settings or labels (the difference is
            named), or is being written by another process.
    """
    out.mkdir(parents=True, exist_ok=True)
    identity = json.loads(json.dumps(identity))
    with lock_folder(out):
        if not (out / RUN).is_file():
            refuse_strangers(out)
            write_checked(out / RUN, identity)
        stored = record_of(out)
        if differ := differences(identity, {name: stored.get(name) for name in identity}):
            raise ValueError(
                f"{out} holds another run ({'; '.join(differ)}): use the same settings and labels "
                "to continue it, or another folder"
            )
        yield


def note(out: Path, **values: Any) -> None:
    """Notes in the run's folder what has become of it."""
    write_checked(out / RUN, record_of(out) | values)


def record_of(out: Path) -> dict[str, Any]:
    """What the run's folder says of it."""
    return read_checked(out / RUN, "delete the folder to train anew, or use another")


def has_ended(folder: Path) -> bool:
    """Whether a run, or what a checkpoint holds, is whole: its state is written last."""
    try:
        return bool(json.loads((folder / TRAINER_STATE_NAME).read_text("utf-8")))
    except (OSError, ValueError):
        return False


def last_checkpoint(out: Path) -> str | None:
    """The last checkpoint that is whole; None where there is none."""
    found = sorted(out.glob("checkpoint-*"), key=lambda path: -int(path.name.partition("-")[2]))
    return next((str(path) for path in found if has_ended(path)), None)
