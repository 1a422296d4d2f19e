"""Commands for the Hub: `publish` and `verify`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Collection, DryRun, DryRunFolder, HubBase, HubBaseRevision, Private, console

publish_app = typer.Typer(help="Put policies and labels on the Hub.", no_args_is_help=True)


@publish_app.command("policy")
def publish_policy(
    folder: Annotated[Path, typer.Argument(help="Folder of the policy.")],
    repo: Annotated[
        str, typer.Option(help="org/name; org/ alone: a name made of base, method and lambda.")
    ],
    base: HubBase = None,
    base_revision: HubBaseRevision = None,
    license: Annotated[
        str | None, typer.Option(help="Licence of the policy; default: the base's.")
    ] = None,
    labels: Annotated[
        list[str] | None, typer.Option(help="Id of the labels on the Hub. Repeatable.")
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(
            help="Data set whose leaderboard on the Hub shows the results: org/name[:task]."
        ),
    ] = None,
    private: Private = False,
    collection: Collection = None,
    dry_run: DryRun = False,
    out: DryRunFolder = None,
) -> None:
    """Publish a policy in one commit: weights, code, tokenizer, card, provenance."""
    from ospruner.hub_cards import commands
    from ospruner.hub_cards.policies import PolicyRelease

    release = PolicyRelease(repo, base, base_revision, license, labels or (), benchmark)
    sending = commands.Sending(private, collection, dry_run, out)
    commands.publish_policy(folder, release, sending, console)


@publish_app.command("labels")
def publish_labels(
    folder: Annotated[
        Path, typer.Argument(help="Label folder, or one that holds train/, validation/, test/.")
    ],
    repo: Annotated[str, typer.Option(help="org/name; org/ alone: a name made of the base.")],
    base: HubBase = None,
    base_revision: HubBaseRevision = None,
    license: Annotated[str | None, typer.Option(help="Licence of the data set.")] = None,
    problems: Annotated[
        str | None, typer.Option(help="Where the problems come from, and their licence.")
    ] = None,
    private: Private = False,
    collection: Collection = None,
    dry_run: DryRun = False,
    out: DryRunFolder = None,
) -> None:
    """Publish labels in one commit: traces, prefixes, card, provenance."""
    from ospruner.eval.schema import COLUMNS, PREFIX_COLUMNS
    from ospruner.hub_cards import commands
    from ospruner.hub_cards.labels import LabelsRelease

    release = LabelsRelease(repo, base, base_revision, license, problems)
    sending = commands.Sending(private, collection, dry_run, out)
    meanings = {
        config: {name: what for name, (_, what) in columns.items()}
        for config, columns in (("default", COLUMNS), ("prefixes", PREFIX_COLUMNS))
    }
    commands.publish_labels(folder, release, meanings, sending, console)


@publish_app.command("space")
def publish_space(
    policy: Annotated[str, typer.Argument(help="Id of a published policy on the Hub.")],
    repo: Annotated[str, typer.Option(help="org/name of the Space; org/ alone: named by policy.")],
    revision: Annotated[
        str | None, typer.Option(help="The policy's commit, branch or tag; its commit is pinned.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="The Space's suggested hardware, such as a10g-small.")
    ] = None,
    private: Private = False,
    collection: Collection = None,
    dry_run: DryRun = False,
    out: DryRunFolder = None,
) -> None:
    """Publish the page of `ospruner app` for a policy as a Space, in one commit."""
    from ospruner.hub_cards import commands
    from ospruner.hub_cards.spaces import SpaceRelease

    release = SpaceRelease(repo, policy, revision, hardware)
    commands.publish_space(release, commands.Sending(private, collection, dry_run, out), console)


def verify(
    repo: Annotated[str, typer.Argument(help="Id of a policy on the Hub, or its folder.")],
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag.")] = None,
) -> None:
    """Check a published policy: code, hashes, base, probabilities; status 1 if one fails."""
    from ospruner.hub_cards import commands

    if not commands.verify(repo, revision, console):
        raise typer.Exit(1)
