"""Publishing a policy: stage its folder, probe it, write its card, send it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.eval.text import penalty_name

from .measurements import write_eval_results
from .names import check_repo_id, collection_title, policy_name
from .probes import PROBES_FILE, largest_difference, load_policy, probe
from .publish import (
    Published,
    add_to_collection,
    base_license,
    commit_message,
    find_base,
    previous_file,
    publish_folder,
)
from .render import License, read_policy_config, write_policy_card
from .staging import (
    POLICY_FILES,
    Staged,
    copy_files,
    file_names,
    pin_base,
    scrub_results,
    seal,
    write_code,
    write_record,
)

__all__ = ["PolicyRelease", "send_policy", "stage_policy"]


@dataclass(frozen=True)
class PolicyRelease:
    """What a publisher says about a policy.

    Attributes:
        repo: `owner/name`; `owner/` alone is completed by the naming scheme.
        base: The base's repository, where the policy was trained on a local folder.
        base_revision: Its commit, branch or tag; resolved to a commit.
        license: In the Hub's spelling; None inherits the base's.
        datasets: Ids of the labels on the Hub.
        benchmark: The data set on the Hub whose leaderboard shall show the results, `org/name` or
            `org/name:task`; None for none.
    """

    repo: str
    base: str | None = None
    base_revision: str | None = None
    license: str | None = None
    datasets: Sequence[str] = ()
    benchmark: str | None = None


def stage_policy(
    folder: Path,
    out: Path,
    release: PolicyRelease,
    api: HfApi,
    load: Callable[[Path], OSPrunerForCausalLM] = load_policy,
) -> tuple[str, Staged]:
    """Writes the exact folder that is published; nothing is sent.

    Args:
        folder: The policy's folder, from training; not changed.
        out: Where to write; an empty or missing folder.
        release: What its publisher says.
        api: The Hub, to pin the base and read its licence.
        load: How to load the staged policy with its base.

    Returns:
        The repository's id, and the staged folder.

    Raises:
        ValueError: If the folder holds no policy, its base is not pinned or not on the Hub, a file
            is a link or holds an access token, `out` is not empty, or as `write_eval_results`.
    """
    config = read_policy_config(folder)
    base, remarks = find_base(config, release.base, release.base_revision, api)
    fixed = config["price"] if config["head"] == "fixed" else None
    name = policy_name(base.id, config["method"], fixed)
    repo_id = check_repo_id(release.repo, name)
    license: License | None
    if release.license is None:
        license, notes = base_license(base, api)
        remarks = [*remarks, *notes]
    else:
        license = License(release.license)
    left_out = copy_files(folder, out, POLICY_FILES)
    write_code(out)
    pin_base(out, base)
    scrub_results(out)
    if release.benchmark is not None:
        write_eval_results(out, release.benchmark, repo_id, api)
    _write_probes(out, repo_id, api, load)
    write_record(folder, out, base, code=True)
    write_policy_card(out, name=repo_id, license=license, datasets=release.datasets)
    seal(out)
    rewritten = set(file_names(out))
    return repo_id, Staged(out, [n for n in left_out if n not in rewritten], remarks)


def send_policy(
    staged: Staged, repo_id: str, *, private: bool, collection: str | None, api: HfApi
) -> tuple[Published, str | None]:
    """Publishes a staged policy, and puts it into a collection where one is named.

    Args:
        staged: From `stage_policy`.
        repo_id: From `stage_policy`.
        private: Make the repository a private one.
        collection: Title or slug; "auto" for the one of the base's family.
        api: The Hub.

    Returns:
        What was done, and the collection's address.

    Raises:
        ValueError, ConnectionError: As `publish_folder` and `add_to_collection`.
    """
    config = read_policy_config(staged.path)
    base, method = config["base_model_name_or_path"], config["method"]
    note = method
    if config["head"] == "price":
        note = f"λ from 0 to {penalty_name(config['price_range'][1])}"
    elif method == "os-pruner":
        note = f"λ = {penalty_name(config['price'])}"
    message = commit_message("policy", [base, note])
    done = publish_folder(staged, repo_id, "model", private=private, message=message, api=api)
    if collection is None:
        return done, None
    title = collection_title(base) if collection == "auto" else collection
    return done, add_to_collection(title, repo_id, "model", note, api)


def _write_probes(
    out: Path, repo_id: str, api: HfApi, load: Callable[[Path], OSPrunerForCausalLM]
) -> None:
    """Stores what the policy says about the probes.

    Where the repository holds probes that this policy reproduces they are kept: computed anew on
    another machine they would differ in the last digits, and make a commit of nothing.
    """
    model = load(out)
    now = probe(model)
    text = json.dumps(now, indent=1) + "\n"
    published = previous_file(repo_id, "model", PROBES_FILE, api)
    if published is not None:
        stored = json.loads(published.read_text(encoding="utf-8"))
        if _questions(stored) == _questions(now):
            difference, tolerated = largest_difference(model, stored)
            if difference <= tolerated / 10:
                text = published.read_text(encoding="utf-8")
    (out / PROBES_FILE).write_text(text, encoding="utf-8")


def _questions(probes: dict[str, Any]) -> list[Any]:
    """What probes ask, without the answers."""
    asked = [[one["prompt_ids"], one["trace_ids"]] for one in probes["probes"]]
    return [probes["format_version"], probes["dtype"], asked]
