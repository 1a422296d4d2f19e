"""Commands that serve a policy and look at it: `serve`, `app` and `doctor`."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .options import EngineArgs, Format, JsonFile, Revision, WindDown, console


def serve(
    context: typer.Context,
    policy: Annotated[str, typer.Argument(help="A policy, as a folder or Hub id.")],
    engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
    mode: Annotated[str | None, typer.Option(help="sample or threshold.")] = None,
    threshold: Annotated[float | None, typer.Option(help="For mode threshold, in [0, 1].")] = None,
    max_loss: Annotated[
        float | None, typer.Option(help="What `ospruner calibrate` promised, such as 0.02.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of a token; default: the policy's own.")
    ] = None,
    answer: Annotated[str | None, typer.Option(help="forced, free, or tools.")] = None,
    wind_down: WindDown = None,
    min_thinking_tokens: Annotated[
        int | None, typer.Option(help="No stop before so many tokens.")
    ] = None,
    max_thinking_tokens: Annotated[
        int | None, typer.Option(help="Stop at the first step end from here on.")
    ] = None,
    control: Annotated[
        float, typer.Option(help="Share of requests that never stop, to measure savings against.")
    ] = 0.0,
    opt_in: Annotated[
        bool, typer.Option("--opt-in", help="Stop only requests that say stop_policy.")
    ] = False,
    engine_arg: EngineArgs = None,
) -> None:
    """Serve a policy: an OpenAI-compatible server; further options are the engine's own."""
    from ospruner.engines.opening import parse_engine_args
    from ospruner.serving.launch import engine_options
    from ospruner.serving.sglang.sglang_server import serve_sglang
    from ospruner.serving.vllm.vllm_server import serve_vllm

    if engine not in ("vllm", "sglang"):
        raise typer.BadParameter(f"--engine is {engine!r}; it must be vllm or sglang.")
    given = {
        "stop_mode": mode,
        "stop_threshold": threshold,
        "stop_max_loss": max_loss,
        "stop_price": price,
        "stop_answer": answer,
        "stop_wind_down": wind_down,
        "min_thinking_tokens": min_thinking_tokens,
        "max_thinking_tokens": max_thinking_tokens,
        "stop_control": control,
    }
    defaults = {key: value for key, value in given.items() if value is not None}
    settings, args = {"stop_policy": not opt_in, **defaults}, parse_engine_args(engine_arg or ())
    if engine == "sglang":
        serve_sglang(policy, settings, [*engine_options(args, says_no=False), *context.args])
    serve_vllm(policy, settings, [*engine_options(args, says_no=True), *context.args])


def app_command(
    policy: Annotated[
        str | None,
        typer.Argument(help="A policy, as a folder or Hub id; default: the embedded reasoner."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Ask a server of `ospruner serve` instead of a policy here.")
    ] = None,
    revision: Revision = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen at; default: this machine alone.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Default: the first free one from 7860.")] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Open a browser, too.")] = False,
) -> None:
    """Open a page that asks the base as it is and pruned, side by side."""
    from ospruner.demo.first_policy import run_app

    run_app(policy, url, revision, console, host=host, port=port, in_browser=browser)


class DoctorGroup(TyperGroup):
    """`ospruner doctor`: what is no command of its own (`plan`) is something to look at."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts `look` before what is neither a command nor --help."""
        if not args or args[0] not in (*self.commands, "--help"):
            args = ["look", *args]
        return super().parse_args(ctx, args)


doctor_app = typer.Typer(
    cls=DoctorGroup,
    help="Say what is understood of a base or a policy, what is wrong, and what a base will need.",
)


@doctor_app.command("plan")
def doctor_plan(
    base: Annotated[str, typer.Option(help="The base, a folder or Hub id; no weights are read.")],
    revision: Revision = None,
    gpu_gib: Annotated[float, typer.Option(help="Memory of each GPU.")] = 80.0,
    gpus: Annotated[int, typer.Option(help="How many GPUs; each holds a whole base.")] = 1,
    traces: Annotated[int, typer.Option(help="Labelled traces.")] = 40_000,
    mean_tokens: Annotated[int, typer.Option(help="Thinking tokens of a trace.")] = 5_000,
    max_tokens: Annotated[int, typer.Option(help="Thinking tokens of the longest.")] = 15_000,
    step_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 40,
    streams: Annotated[int, typer.Option(help="Traces sampled at once on a GPU.")] = 32,
    label_tokens_per_second: Annotated[
        float, typer.Option(help="What one GPU writes, all streams together; an assumption.")
    ] = 2_500.0,
    tflops: Annotated[
        float, typer.Option(help="10^12 operations/s of one GPU in training; an assumption.")
    ] = 150.0,
    epochs: Annotated[int, typer.Option(help="Passes over the traces, all lambdas.")] = 8,
    layers: Annotated[int, typer.Option(help="Layers of the base that the policy copies.")] = 2,
    tuning: Annotated[str, typer.Option(help="queries or layers.")] = "queries",
    micro_batch_tokens: Annotated[int, typer.Option(help="As for train.")] = 16_384,
    json_file: JsonFile = None,
) -> None:
    """Say what labelling, training and serving will need; status 1 if one does not fit."""
    from ospruner.doctor.plan import Workload, run_plan

    work = Workload(
        gpu_gib=gpu_gib, gpus=gpus, traces=traces, mean_tokens=mean_tokens, max_tokens=max_tokens,
        step_tokens=step_tokens, streams=streams, label_tokens_per_second=label_tokens_per_second,
        tflops=tflops, epochs=epochs, num_policy_layers=layers, tuning=tuning,
        micro_batch_tokens=micro_batch_tokens,
    )  # fmt: skip
    if not run_plan(base, revision, work, console, json_file):
        raise typer.Exit(1)


@doctor_app.command("drift")
def doctor_drift(
    policy: Annotated[str, typer.Argument(help="A calibrated policy, as a folder or Hub id.")],
    served: Annotated[
        str,
        typer.Option(help="A server's http://.../metrics, its text in a file, or records.jsonl."),
    ],
    max_loss: Annotated[
        float | None, typer.Option(help="Which promise, where there are several.")
    ] = None,
    revision: Revision = None,
    json_file: JsonFile = None,
) -> None:
    """Compare what a server sees with what a policy was calibrated on; status 1 if they differ."""
    from ospruner.doctor.drift import run_drift

    if not run_drift(policy, served, max_loss, console, revision, json_file):
        raise typer.Exit(1)


@doctor_app.command("look", hidden=True)
def doctor(
    subject: Annotated[
        str | None, typer.Argument(help="A base or a policy, as a folder or Hub id; optional.")
    ] = None,
    revision: Revision = None,
    reasoning_format: Format = None,
    json_file: JsonFile = None,
) -> None:
    """Print versions, what is understood of a base or a policy, and what is wrong (status 1)."""
    from ospruner.doctor.examination import run_doctor

    if not run_doctor(subject, revision, reasoning_format, console, json_file):
        raise typer.Exit(1)
