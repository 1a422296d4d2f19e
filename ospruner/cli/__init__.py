"""The one command, `ospruner`. Only wiring: a sub-command calls one function."""

import typer
from rich.console import Console
from rich.markup import escape

from .comparing import eval_app, lm_eval_command
from .labelling import label_command, labels_app
from .publishing import publish_command, verify_command
from .serving import app_command, doctor_app, serve
from .toy import demo
from .training import calibrate_command, train_command

app = typer.Typer(
    name="ospruner",
    help="Stop reasoning models at the right paragraph.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)

# `ospruner --help` shows them in this order.
app.command()(demo)
app.command("train")(train_command)
app.command("label")(label_command)
app.command("calibrate")(calibrate_command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.command("app")(app_command)
lm_eval_settings = {"ignore_unknown_options": True, "help_option_names": []}
app.command("lm-eval", context_settings=lm_eval_settings)(lm_eval_command)
app.command("publish")(publish_command)
app.command("verify")(verify_command)
app.add_typer(labels_app, name="labels")
app.add_typer(eval_app, name="eval")
app.add_typer(doctor_app, name="doctor")


def main() -> None:
    """Entry point of the console script; errors that a user can mend come without a traceback."""
    try:
        app()
    except (ValueError, OSError, FloatingPointError, MemoryError) as error:
        Console(stderr=True).print(f"[red]Error:[/red] {escape(str(error))}")
        raise SystemExit(1) from None
