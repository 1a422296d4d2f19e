"""What several commands share: their options, and the console that they print on."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()


def _in_a_folder(file: Path | None) -> Path | None:
    """Makes the folder of a file that is written after the work, before it."""
    if file is not None:
        try:
            file.absolute().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"{file} cannot be written ({error}).") from error
    return file


# Options that several commands share.
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write every number to this file too.",
        dir_okay=False,
        callback=_in_a_folder,
    ),
]
Format = Annotated[
    str | None, typer.Option("--format", help="deepseek-r1, qwen3, harmony, plain or a .json file.")
]
Revision = Annotated[
    str | None, typer.Option(help="Commit, branch or tag of the base or policy on the Hub.")
]
# of those that label
Engine = Annotated[
    str | None,
    typer.Option(
        help="transformers, vllm, sglang or openai; default: vllm with a GPU, else transformers."
    ),
]
Urls = Annotated[list[str] | None, typer.Option(help="A server of the engine. Repeatable.")]
EngineBatch = Annotated[
    int | None, typer.Option(help="Rows or requests at once; default: the engine's.")
]
Dtype = Annotated[str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16 or float16.")]
Device = Annotated[
    str | None, typer.Option(help="Torch device that computes in this process; default: the best.")
]
States = Annotated[
    Path | None,
    typer.Option(
        help="Folder that keeps the trunk's states, for the next command on these labels.",
        file_okay=False,
    ),
]
ForceBase = Annotated[
    str | None,
    typer.Option(metavar="REASON", help="Take another base than the labels'; kept in the record."),
]
TaskName = Annotated[
    str,
    typer.Option(help="math, choice, exact, code, generated or FILE.py; settings: name:key=value."),
]
AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Run programs that the model wrote, locked in; see docs."),
]
AcrossTasks = Annotated[
    bool, typer.Option("--across-tasks", help="Take policies that were trained on another task.")
]
ThinkingCap = Annotated[int, typer.Option(help="Cap on a trace's thinking tokens.")]
WindDown = Annotated[
    str | None,
    typer.Option(help="A sentence forced before the closing: 'I have what I need, so:'."),
]
EngineArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-arg", help="An argument of the engine: tensor_parallel_size=2. Repeatable."
    ),
]
StepStride = Annotated[
    int, typer.Option(help="Label every k-th step; policies trained on them decide there alone.")
]
Chunk = Annotated[
    int, typer.Option(help="Traces begun and not yet written; a kill loses at most these.")
]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Try the traces again that an error ended.")
]
# of those that evaluate
BaseName = Annotated[str | None, typer.Option(help="Name of the base in tables.")]
ProblemsName = Annotated[str | None, typer.Option(help="Name of the problems in tables.")]
Penalties = Annotated[str, typer.Option("--lambdas", help="Also print rewards at these λ.")]
Charge = Annotated[
    str, typer.Option(help="What AES and rewards count: thinking (tokens, the paper) or compute.")
]
Differences = Annotated[
    bool, typer.Option("--differences", help="Also show paired differences between methods.")
]
Domain = Annotated[
    str | None,
    typer.Option(help="Take the price that policies of every price chose for this domain."),
]
LengthPenalty = Annotated[
    str,
    typer.Option(
        "--price",
        help="Prices of a token for policies of every price: 5e-5,1e-4, or frontier for 31.",
    ),
]
