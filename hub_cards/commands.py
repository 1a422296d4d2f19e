"""What `ospruner publish` and `ospruner verify` do and print."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from huggingface_hub import HfApi
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from .labels import LabelsRelease, send_labels, stage_labels
from .policies import PolicyRelease, send_policy, stage_policy
from .publish import Published
from .spaces import SpaceRelease, send_space, stage_space
from .staging import Staged
from .verify import fetch, verify_folder

__all__ = ["Sending", "publish_labels", "publish_policy", "publish_space", "verify"]


@dataclass(frozen=True)
class Sending:
    """How something is published.

    Attributes:
        private: Make the repository a private one.
        collection: Title or slug of a collection; "auto" for the one of the base's family.
        dry_run: Write the folder and send nothing.
        out: Where a dry run writes it; None for `runs/publish/` and the repository's name.
    """

    private: bool = False
    collection: str | None = None
    dry_run: bool = False
    out: Path | None = None


def publish_policy(
    folder: Path, release: PolicyRelease, sending: Sending, console: Console
) -> None:
    """Publishes a policy, or writes the folder that would be published.

    Args:
        folder: The policy's folder.
        release: What its publisher says.
        sending: How.
        console: Where to print.

    Raises:
        ValueError, ConnectionError: As `stage_policy` and `send_policy`.
    """
    api = HfApi()
    with _staging_folder(release.repo, sending) as stage:
        repo_id, staged = stage_policy(folder, stage, release, api)
        _send(staged, repo_id, send_policy, sending, api, console)


def publish_labels(
    folder: Path,
    release: LabelsRelease,
    columns: Mapping[str, Mapping[str, str]],
    sending: Sending,
    console: Console,
) -> None:
    """Publishes labels, or writes the folder that would be published.

    Args:
        folder: The label folder, or one that holds a label folder a split.
        release: What its publisher says.
        columns: See `stage_labels`.
        sending: How.
        console: Where to print.

    Raises:
        ValueError, ConnectionError: As `stage_labels` and `send_labels`.
    """
    api = HfApi()
    with _staging_folder(release.repo, sending) as stage:
        repo_id, staged = stage_labels(folder, stage, release, columns, api)
        _send(staged, repo_id, send_labels, sending, api, console)


def publish_space(release: SpaceRelease, sending: Sending, console: Console) -> None:
    """Publishes a policy's page as a Space, or writes the folder that would be published.

    Args:
        release: What its publisher says.
        sending: How.
        console: Where to print.

    Raises:
        ValueError, ConnectionError: As `stage_space` and `send_space`.
    """
    api = HfApi()
    with _staging_folder(release.repo, sending) as stage:
        repo_id, staged = stage_space(stage, release, api)
        _send(staged, repo_id, send_space, sending, api, console)


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
        console.print(f"Published {done.url} at commit {done.commit}", soft_wrap=True)
    else:
        text = f"{done.url} holds exactly this already, at commit {done.commit}"
        console.print(text, soft_wrap=True)
    if collection is not None:
        console.print(f"In collection {collection}", soft_wrap=True)


class _Send(Protocol):
    def __call__(
        self, staged: Staged, repo_id: str, *, private: bool, collection: str | None, api: HfApi
    ) -> tuple[Published, str | None]: ...


def _send(
    staged: Staged, repo_id: str, send: _Send, sending: Sending, api: HfApi, console: Console
) -> None:
    print_staged(staged, repo_id, console)
    if sending.dry_run:
        console.print(f"Nothing was sent. The folder: {staged.path}", soft_wrap=True)
        return
    done, where = send(
        staged, repo_id, private=sending.private, collection=sending.collection, api=api
    )
    print_published(done, where, console)


@contextmanager
def _staging_folder(repo: str, sending: Sending) -> Iterator[Path]:
    if sending.dry_run:
        yield sending.out or Path("runs/publish") / repo.rstrip("/").rpartition("/")[2]
        return
    if sending.out is not None:
        raise ValueError(
            f"out={str(sending.out)!r} is for --dry-run alone: leave it out, or add --dry-run"
        )
    with tempfile.TemporaryDirectory(prefix="ospruner-publish-") as folder:
        yield Path(folder)
