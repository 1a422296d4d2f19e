"""Publishing on the Hub: a policy or labels go up as one commit, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
)
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is httpx2's
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in __all__

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.durable import write_checked
from ospruner.eval.results import RESULTS_FILE, Results
from ospruner.provenance import (
    PROVENANCE_FILE,
    file_hash,
    is_hub_id,
    read_object,
    read_provenance,
)
from ospruner.train.labels.folder import (
    MANIFEST,
    read_manifest,
    refuse_damage,
    refuse_other_data,
)

from .cards import (
    CARD_FILE,
    PICTURE_FILE,
    License,
    labels_card,
    policy_card,
    read_policy_config,
)
from .probes import PROBES_FILE, load_policy, probe
from .staging import (
    Base,
    Staged,
    code_files,
    copy_files,
    empty_folder,
    file_names,
    scrubbed,
    seal,
    write_json,
    write_record,
)

__all__ = ["Published", "Release", "publish", "send", "stage"]

POLICY_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    PICTURE_FILE,
    RESULTS_FILE,
    # whatever tokenizers save
    "added_tokens.json",
    "additional_chat_templates/*.jinja",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
STATISTICS = "statistics.png"
LABEL_FILES = ("data/*.parquet", "prefixes/*.parquet", MANIFEST, STATISTICS)
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Release:
    """What a publisher says about a policy or labels.

    Attributes:
        repo: `owner/name`.
        base: The base's repository, where a local folder was used.
        base_revision: Its commit, branch or tag; resolved to a commit.
        license: In the Hub's spelling; None inherits the base's for a policy.
        labels: Of a policy: ids on the Hub of the labels that it was trained on.
        problems: Of labels: where the problems come from and under which licence, in a sentence.
    """

    repo: str
    base: str | None = None
    base_revision: str | None = None
    license: str | None = None
    labels: Sequence[str] = ()
    problems: str | None = None

    def __post_init__(self) -> None:
        try:
            validate_repo_id(self.repo)
        except HFValidationError as error:
            raise ValueError(f"repo={self.repo!r} cannot be an id on the Hub: {error}") from error
        if self.repo.count("/") != 1:
            raise ValueError(f"repo={self.repo!r} must name the owner too, as in org/{self.repo}")


@dataclass(frozen=True)
class Published:
    """What publishing did.

    Attributes:
        repo: The repository.
        commit: Its head now; None after a dry run.
        changed: Whether a commit was made; False where everything was there already.
        url: Where people look at it; None after a dry run.
        staged: What was sent; its folder is kept by a dry run alone.
    """

    repo: str
    commit: str | None
    changed: bool
    url: str | None
    staged: Staged


def publish(
    folder: str | Path,
    repo: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    out: str | Path | None = None,
    **release: Any,
) -> Published:
    """Publish a policy or labels on the Hub, in one commit.

    ```python
    ospruner.publish("policy", "org/ospruner-qwen3-8b")
    ospruner.publish("labels", "org/labels-qwen3-8b", license="mit", problems="DeepScaleR, MIT.")
    ```

    What goes up is a list of files: weights, code, tokenizer and results of a policy; shards and
    manifests of labels. A card, the record of where it comes from, and a hash of every file are
    written beside them. Files of other people in the repository are left alone.

    Args:
        folder: A policy's folder; a label folder; or one that holds label folders named train,
            validation, test.
        repo: `owner/name`; made where it does not exist.
        private: Make it a private one.
        dry_run: Write the exact folder and send nothing; the Hub is not asked.
        out: Where a dry run writes; default: `runs/publish/` and the repository's name.
        release: Further fields of `Release`: `base` and `base_revision` where the base was a local
            folder, `license`, `labels` (of a policy), `problems` (of labels).

    Raises:
        ValueError: The folder holds neither, or something that must not be published: a base that
            is not pinned, a link, an access token; the repository is a stranger's, or public
            though a private one is wanted.
        ConnectionError: The Hub could not be reached, or refused.
    """
    said = Release(repo, **release)
    if dry_run:
        target = Path(out) if out is not None else Path("runs/publish") / repo.rpartition("/")[2]
        return Published(repo, None, False, None, stage(Path(folder), target, said, None))
    if out is not None:
        raise ValueError(f"out={str(out)!r} is for a dry run alone: leave it out, or add --dry-run")
    api = HfApi()
    with tempfile.TemporaryDirectory(prefix="ospruner-publish-") as scratch:
        return send(stage(Path(folder), Path(scratch) / "staged", said, api), said, private, api)


def stage(
    folder: Path,
    out: Path,
    release: Release,
    api: HfApi | None,
    load: Callable[[Path], OSPrunerForCausalLM] = load_policy,
) -> Staged:
    """Writes the exact folder that is published; nothing is sent.

    Args:
        folder: Of the policy or the labels; not changed.
        out: Where to write: an empty or missing folder, or that of an earlier dry run.
        release: What its publisher says.
        api: The Hub, to pin the base; None to ask nobody.
        load: How to load the policy with its base.

    Raises:
        ValueError: As `publish`.
    """
    if (folder / "config.json").is_file():
        return _stage_policy(folder, out, release, api, load)
    parts = {name: folder / name for name in SPLITS if (folder / name / MANIFEST).is_file()}
    if (folder / MANIFEST).is_file():
        parts = {"train": folder}
    if not parts:
        raise ValueError(
            f"folder={str(folder)!r} holds neither a policy (config.json) nor labels "
            f"({MANIFEST}, or label folders named {', '.join(SPLITS)})"
        )
    return _stage_labels(folder, parts, out, release, api)


def _stage_policy(
    folder: Path,
    out: Path,
    release: Release,
    api: HfApi | None,
    load: Callable[[Path], OSPrunerForCausalLM],
) -> Staged:
    config = read_policy_config(folder)
    base, remarks = _find_base(config.base_model_name_or_path, config.base_revision, release, api)
    license = License(release.license) if release.license else _license_of(base, api)
    if license is None:
        remarks.append(
            f"the licence of {base.id} is not known: the policy's copied layers are under it; find "
            "out, and name it with --license"
        )
    empty_folder(out)
    left_out = copy_files(folder, out, POLICY_FILES)
    for name, source in code_files().items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, out / name)
    _pin_base(out / "config.json", base)
    if (out / RESULTS_FILE).is_file():
        results = Results.read(out / RESULTS_FILE)
        replace(results, about=scrubbed(results.about)).save(out / RESULTS_FILE)
    write_json(out / PROBES_FILE, probe(load(folder)))
    write_record(folder, out, base, code=True)
    card = policy_card(out, name=release.repo, license=license, labels=release.labels)
    card.save(out / CARD_FILE)
    sizes = seal(out)
    message = f"policy: {base.id}, {config.method} (published with ospruner)"
    kept_back = [name for name in left_out if name not in sizes]
    return Staged(out, "model", message, sizes, kept_back, remarks)


def _pin_base(path: Path, base: Base) -> None:
    """Writes the pinned base into a staged configuration, and takes this machine's paths out."""
    values = read_object(path)
    values |= {"base_model_name_or_path": base.id, "base_revision": base.revision}
    values.pop("_name_or_path", None)
    if isinstance(values.get("text_config"), dict):
        values["text_config"].pop("_name_or_path", None)
    write_json(path, values)


def _stage_labels(
    folder: Path, parts: Mapping[str, Path], out: Path, release: Release, api: HfApi | None
) -> Staged:
    """Label folders are published as they stand: each split, read back, is a label folder again."""
    manifests = {split: _manifest(path) for split, path in parts.items()}
    (first, *others) = manifests
    settings = manifests[first]["settings"]
    for split in others:
        if _shared(manifests[split]["settings"]) != _shared(settings):
            raise ValueError(
                f"{parts[split]} was labelled with other settings than {parts[first]}: publish it "
                "as a data set of its own"
            )
    base, remarks = _find_base(settings["base_model"], settings["base_revision"], release, api)
    if release.license is None:
        remarks.append("no licence is stated: name the data set's with --license")
    empty_folder(out)
    left_out, splits = [], {}
    for split, part in parts.items():
        prefix = "" if part == folder else f"{split}/"
        left_out += [prefix + name for name in copy_files(part, out / prefix, LABEL_FILES)]
        manifest = scrubbed(manifests[split])
        manifest["settings"] |= {"base_model": base.id, "base_revision": base.revision}
        write_checked(out / prefix / MANIFEST, manifest)
        splits[split] = (prefix, manifests[split])
    left_out += copy_files(folder, out, [STATISTICS]) if parts != {"train": folder} else []
    pictures = [name for name in file_names(out) if name.endswith(STATISTICS)]
    write_record(parts[first], out, base, code=False)
    card = labels_card(
        out, splits, name=release.repo, base=base, license=release.license,
        problems=release.problems, picture=pictures[0] if pictures else None,
    )  # fmt: skip
    card.save(out / CARD_FILE)
    sizes = seal(out)
    traces = sum(manifest["traces"] for manifest in manifests.values())
    message = f"labels: {base.id}, {traces} traces (published with ospruner)"
    kept_back = sorted(set(left_out) - set(sizes))
    return Staged(out, "dataset", message, sizes, kept_back, remarks)


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished label folder whose shards are what it says."""
    manifest = read_manifest(folder)
    if not manifest.get("finished"):
        raise ValueError(f"{folder} is not finished: run its labelling again, it goes on there")
    refuse_other_data(folder, manifest)
    refuse_damage(folder, manifest)
    return manifest


def _shared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the splits of one data set have in common."""
    free = ("seed", "samples_per_problem")
    return {name: value for name, value in settings.items() if name not in free}


def send(staged: Staged, release: Release, private: bool, api: HfApi) -> Published:
    """Brings a repository to the staged folder's state in one commit.

    Files that an earlier publishing put there and this one lacks are deleted in the same commit.
    huggingface_hub retries what it sends; nothing shows before the commit, so that a failure
    leaves the repository as it was (a new one: empty).

    Raises:
        ValueError, ConnectionError: As `publish`.
    """
    repo, kind = release.repo, staged.kind
    try:
        url = str(api.create_repo(repo, repo_type=kind, private=private or None, exist_ok=True))
        info = api.repo_info(repo, repo_type=kind)
        if private and not info.private:
            raise ValueError(
                f"repo={repo!r} exists and is public: leave --private out, choose another name, or "
                "make it private on the Hub first"
            )
        ours = _published_files(repo, kind, api)
        stale = sorted(set(ours) - set(staged.sizes) - {PROVENANCE_FILE})
        done = api.create_commit(
            repo,
            [
                *(CommitOperationAdd(name, staged.path / name) for name in staged.sizes),
                *(CommitOperationDelete(name, is_folder=False) for name in stale),
            ],
            commit_message=staged.message,
            repo_type=kind,
            parent_commit=info.sha,
        )
    except (HTTPError, OSError, RuntimeError) as error:
        # RuntimeError is what huggingface_hub raises for an upload that failed.
        raise ConnectionError(
            f"publishing {repo} failed ({_one_line(error)}): it went up whole or not at all; run "
            "the same command again, which commits what is missing, if anything"
        ) from error
    return Published(repo, done.oid, done.oid != info.sha, url, staged)


def _published_files(repo: str, kind: str, api: HfApi) -> list[str]:
    """The files that an earlier publishing put into the repository, as far as they are there.

    Raises:
        ValueError: The repository holds files but no record of a publishing.
    """
    present = set(api.list_repo_files(repo, repo_type=kind))
    if not present - {".gitattributes", CARD_FILE}:
        return []
    try:
        record = hf_hub_download(
            repo, PROVENANCE_FILE, repo_type=kind, endpoint=api.endpoint, token=api.token
        )
    except EntryNotFoundError as error:
        raise ValueError(
            f"repo={repo!r} holds files that ospruner did not publish "
            f"({', '.join(sorted(present)[:5])}): choose another name, or empty it first"
        ) from error
    return [name for name in read_provenance(Path(record).parent).files if name in present]


def _find_base(
    pinned: str, pinned_revision: str | None, release: Release, api: HfApi | None
) -> tuple[Base, list[str]]:
    """The base on the Hub, pinned by commit, with remarks.

    Args:
        pinned: What the policy or the labels name: a repository or a folder.
        pinned_revision: Their commit.
        release: What the publisher says.
        api: The Hub; None to take the publisher's word.

    Raises:
        ValueError: No repository is named, another one than that of the policy, one or a revision
            that the Hub does not have, or one whose weights are not those of the local folder.
    """
    local = not is_hub_id(pinned)
    if local and release.base is None:
        raise ValueError(
            f"the base is a local folder ({Path(pinned).name}), which nobody else could load: say "
            "which repository it is, --base org/name --base-revision COMMIT"
        )
    if not local and release.base not in (None, pinned):
        raise ValueError(
            f"base={release.base!r}, but it was made with {pinned!r}: leave --base out"
        )
    name = release.base or pinned
    asked = release.base_revision or (None if local else pinned_revision)
    if api is None:
        return Base(name, asked or ""), []
    try:
        found = Base(name, str(api.model_info(name, revision=asked).sha))
    except RevisionNotFoundError as error:
        raise ValueError(f"base {name!r} has no revision {asked!r} on the Hub") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"base {name!r} is not on the Hub, or not visible with your token: publish it first, "
            "or name another with --base"
        ) from error
    except (HTTPError, OSError) as error:
        raise ConnectionError(
            f"the Hub cannot be asked for the base {name} ({_one_line(error)}): nothing was sent"
        ) from error
    if Path(pinned).is_dir():
        _compare_weights(Path(pinned), found, api)
    if asked is None:
        return found, [f"base {name} is pinned at its present commit {found.revision}"]
    return found, []


def _compare_weights(folder: Path, base: Base, api: HfApi) -> None:
    """Refuses a local base whose weights are not those on the Hub.

    Raises:
        ValueError: Naming the first file that differs.
    """
    local = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    for entry in api.get_paths_info(base.id, list(local), revision=base.revision):
        path = local.pop(entry.path)
        if isinstance(entry, RepoFile) and entry.lfs and entry.lfs.sha256 != file_hash(path):
            raise ValueError(
                f"{entry.path} of {base.id} at {base.revision} is not the file of the local base "
                f"{folder.name}: name the repository and the commit that was used"
            )
    if local:
        raise ValueError(
            f"{base.id} at {base.revision} lacks {', '.join(local)} of the local base "
            f"{folder.name}: name the repository that was used"
        )


def _license_of(base: Base, api: HfApi | None) -> License | None:
    """The licence that a base's card states; None where it states none, or nobody is asked."""
    card = None if api is None else api.model_info(base.id, revision=base.revision).card_data
    stated = card.to_dict() if card is not None else {}
    license = stated.get("license")
    if not isinstance(license, str) or license == "unknown":
        return None
    return License(license, stated.get("license_name"), stated.get("license_link"))


def _one_line(error: BaseException) -> str:
    """The innermost reason of an error, without the request that led to it."""
    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    return " ".join(line.strip() for line in text.splitlines() if line.strip())
