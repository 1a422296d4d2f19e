"""What `ospruner publish` and `ospruner verify` do and print."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from .policies import PolicyRelease, send_policy, stage_policy
from .publish import Published
from .staging import Staged
from .verify import fetch, verify_folder

__all__ = ["publish_policy", "verify"]


def publish_policy(
    folder: Path,
    release: PolicyRelease,
    *,
    private: bool,
    collection: str | None,
    dry_run: bool,
    out: Path | None,
    console: Console,
) -> None:
    """Publishes a policy, or writes the folder that would be published.

    Args:
        folder: The policy's folder.
        release: What its publisher says.
        private: Make the repository a private one.
        collection: Title or slug; "auto" for the one of the base's family.
        dry_run: Write the folder and send nothing.
        out: Where a dry run writes it; None for `runs/publish/` and the repository's name.
        console: Where to print.

    Raises:
        ValueError, ConnectionError: As `stage_policy` and `send_policy`.
    """
    api = HfApi()
    with _staging_folder(release.repo, dry_run, out) as stage:
        repo_id, staged = stage_policy(folder, stage, release, api)
        print_staged(staged, repo_id, console)
        if dry_run:
            console.print(f"Nothing was sent. The folder: {stage}")
            return
        done, where = send_policy(staged, repo_id, private=private, collection=collection, api=api)
        print_published(done, where, console)


def verify(repo: str, revision: str | None, console: Console) -> bool:
    """Prints what `verify_folder` finds about a repository; returns whether all is well.

    Raises:
        ValueError: If there is no such repository, or it is no published policy.
    """
    folder, commit = fetch(repo, revision, HfApi())
    checks = verify_folder(folder)
    table = Table(title=f"{escape(repo)}, {commit}", show_header=False)
    for check in checks:
        verdict = "[green]ok[/green]" if check.ok else "[red]NO[/red]"
        table.add_row(verdict, check.question, escape(check.detail))
    console.print(table)
    return all(check.ok for check in checks)


def print_staged(staged: Staged, repo_id: str, console: Console) -> None:
    """Prints the tree that is published, with sizes, what is left out, and remarks."""
    table = Table(title=escape(repo_id), show_header=False, box=None, title_justify="left")
    table.add_column(overflow="fold")
    table.add_column(justify="right")
    for name, size in staged.sizes().items():
        table.add_row(escape(name), decimal(size))
    table.add_row("in all", decimal(sum(staged.sizes().values())))
    console.print(table)
    if staged.left_out:
        console.print(f"Not published: {escape(', '.join(staged.left_out))}")
    for remark in staged.remarks:
        console.print(f"[yellow]Note:[/yellow] {escape(remark)}")


def print_published(done: Published, collection: str | None, console: Console) -> None:
    """Prints what publishing did."""
    if done.changed:
        console.print(f"Published {done.url} at commit {done.commit}")
    else:
        console.print(f"{done.url} holds exactly this already, at commit {done.commit}")
    if collection is not None:
        console.print(f"In collection {collection}")


@contextmanager
def _staging_folder(repo: str, dry_run: bool, out: Path | None) -> Iterator[Path]:
    if dry_run:
        yield out or Path("runs/publish") / repo.rstrip("/").rpartition("/")[2]
        return
    if out is not None:
        raise ValueError(f"out={str(out)!r} is for --dry-run alone: leave it out, or add --dry-run")
    with tempfile.TemporaryDirectory(prefix="ospruner-publish-") as folder:
        yield Path(folder)
