"""Commands for the Hub: `publish` and `verify`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from .options import console


def publish_command(
    folder: Annotated[
        Path, typer.Argument(help="A policy's folder, or one of labels (or of train/, test/, ...).")
    ],
    repo: Annotated[str, typer.Argument(help="Where to: org/name.")],
    base: Annotated[
        str | None, typer.Option(help="The base's id on the Hub, if it was a local folder.")
    ] = None,
    base_revision: Annotated[
        str | None, typer.Option(help="The base's commit, branch or tag; its commit is pinned.")
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="In the Hub's spelling; default: for a policy, the base's.")
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(help="Of a policy: its labels' id on the Hub. Repeatable."),
    ] = None,
    problems: Annotated[
        str | None, typer.Option(help="Of labels: where the problems come from, and their licence.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the exact folder, send nothing.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where a dry run writes; default: runs/publish/NAME.")
    ] = None,
) -> None:
    """Put a policy or labels on the Hub in one commit: files, code, card, provenance."""
    from ospruner.hub_cards.publish import publish

    done = publish(
        folder, repo, private=private, dry_run=dry_run, out=out, base=base,
        base_revision=base_revision, license=license, labels=labels or (), problems=problems,
    )  # fmt: skip
    staged = done.staged
    table = Table(title=escape(repo), show_header=False, box=None, title_justify="left")
    table.add_column(overflow="fold")
    table.add_column(justify="right")
    for name, size in staged.sizes.items():
        table.add_row(escape(name), decimal(size))
    table.add_row("in all", decimal(sum(staged.sizes.values())))
    console.print(table)
    if staged.left_out:
        console.print(f"Not published: {escape(', '.join(staged.left_out))}")
    for remark in staged.remarks:
        console.print(f"[yellow]Note:[/yellow] {escape(remark)}")
    if done.url is None:
        said = f"Nothing was sent. The folder: {staged.path}"
    elif done.changed:
        said = f"Published {done.url} at commit {done.commit}"
    else:
        said = f"{done.url} holds exactly this already, at commit {done.commit}"
    console.print(said, soft_wrap=True)


def verify_command(
    repo: Annotated[str, typer.Argument(help="Id of a policy on the Hub, or its folder.")],
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag.")] = None,
) -> None:
    """Check a published policy: code, hashes, base, probabilities; status 1 if one fails."""
    from ospruner.hub_cards.verify import verify

    checks = verify(repo, revision)
    table = Table(title=escape(repo), show_header=False)
    for check in checks:
        verdict = "[green]ok[/green]" if check.ok else "[red]NO[/red]"
        table.add_row(verdict, check.question, escape(check.detail))
    console.print(table)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)
