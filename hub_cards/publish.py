"""Publishing on the Hub: a policy or labels go up as one commit, or not at all."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is httpx2's
    EntryNotFoundError,
    HFValidationError,
    HTTPError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in __all__

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.durable import write_checked
from ospruner.eval.results import RESULTS_FILE, Results
from ospruner.provenance import PROVENANCE_FILE, file_hash, is_hub_id, read_object, read_provenance
from ospruner.train.labels.folder import MANIFEST, read_manifest, refuse_damage, refuse_other_data

from .cards import (
    CARD_FILE,
    PICTURE_FILE,
    labels_card,
    policy_card,
    read_policy_config,
    told_default,
)
from .staging import (
    Base,
    Published,
    code_files,
    copy_files,
    empty_folder,
    file_names,
    scrubbed,
    seal,
    write_json,
    write_record,
)
from .verify import PROBES_FILE, ask_hub, load_policy, one_line, probe

POLICY_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", PICTURE_FILE, RESULTS_FILE),
    # whatever tokenizers save
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
)
LABEL_FILES = ("data/*.parquet", "prefixes/*.parquet", MANIFEST)
SPLITS = ("train", "validation", "test")
_FREE = {"seed": 0, "samples_per_problem": 1}  # splits of one data set need not share these


def _said(text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Release:
    """What a publisher says about a policy or labels."""

    repo: str
    base: str | None = _said("The base's id on the Hub, if it was a local folder.")
    base_revision: str | None = _said("The base's commit, branch or tag; its commit is pinned.")
    license: str | None = _said("In the Hub's spelling; default: for a policy, the base's.")
    labels: tuple[str, ...] = _said("Of a policy: its labels' id on the Hub. Repeatable.", ())
    problems: str | None = _said("Of labels: where the problems come from, and their licence.")

    def __post_init__(self) -> None:
        try:
            validate_repo_id(self.repo)
        except HFValidationError as error:
            raise ValueError(f"repo={self.repo!r} cannot be an id on the Hub: {error}") from error
        if self.repo.count("/") != 1:
            raise ValueError(f"repo={self.repo!r} must name the owner too, as in org/{self.repo}")


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
        release: Further fields of `Release`: `base` and `base_revision` (which is resolved to a
            commit) where the base was a local folder, `license`, `labels` (of a policy), `problems`
            (of labels).

    Raises:
        ValueError: The folder holds neither, or something that must not be published: a base that
            is not pinned, a link, an access token; the repository is a stranger's, or public
            though a private one is wanted.
        ConnectionError: The Hub could not be reached, or refused.
    """
    said = Release(repo, **release)
    if dry_run:
        target = Path(out) if out is not None else Path("runs/publish") / repo.rpartition("/")[2]
        return stage(Path(folder), target, said, None)
    if out is not None:
        raise ValueError(f"out={str(out)!r} is for a dry run alone: leave it out, or add --dry-run")
    api = HfApi()
    with tempfile.TemporaryDirectory(prefix="ospruner-publish-") as scratch:
        return send(stage(Path(folder), Path(scratch) / "staged", said, api), repo, private, api)


def stage(
    folder: Path,
    out: Path,
    release: Release,
    api: HfApi | None,
    load: Callable[[Path], OSPrunerForCausalLM] = load_policy,
) -> Published:
    """Writes the exact folder that is published, of a policy or labels; nothing is sent.

    Without `api`, which pins the base, nobody is asked; `load` loads a policy with its base.

    Raises:
        ValueError: As `publish`.
    """
    if (folder / "config.json").is_file():
        kind, staged = "model", _stage_policy(folder, out, release, api, load)
    else:
        kind, staged = "dataset", _stage_labels(folder, out, release, api)
    what, left_out, remarks = staged
    sizes = seal(out)
    message = f"{what} (published with ospruner)"
    return Published(out, kind, message, sizes, sorted(set(left_out) - set(sizes)), remarks)


Staged = tuple[str, list[str], list[str]]  # what it is, the files left out, remarks


def _stage_policy(
    folder: Path,
    out: Path,
    release: Release,
    api: HfApi | None,
    load: Callable[[Path], OSPrunerForCausalLM],
) -> Staged:
    config = read_policy_config(folder)
    base, remarks = _find_base(config.base_model_name_or_path, config.base_revision, release, api)
    license = {"license": release.license} if release.license else base.license
    if not license:
        remarks.append(
            f"the licence of {base.id} is not known: the policy's copied layers are under it; find "
            "out, and name it with --license"
        )
    empty_folder(out)
    left_out = copy_files(folder, out, POLICY_FILES)
    for name, source in code_files().items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, out / name)
    values = read_object(out / "config.json")
    values |= {"base_model_name_or_path": base.id, "base_revision": base.revision or None}
    for part in (values, values.get("text_config") or {}):
        part.pop("_name_or_path", None)  # a path of this machine
    write_json(out / "config.json", values)
    if (out / RESULTS_FILE).is_file():
        results = Results.read(out / RESULTS_FILE)
        replace(results, about=scrubbed(results.about)).save(out / RESULTS_FILE)
    write_json(out / PROBES_FILE, probe(load(folder)))
    write_record(folder, out, base, code=True)
    card = policy_card(out, name=release.repo, license=license, labels=release.labels)
    card.save(out / CARD_FILE)
    remarks += [said] if (said := told_default(folder)) else []
    return f"policy: {base.id}, {config.method}", left_out, remarks


def _stage_labels(folder: Path, out: Path, release: Release, api: HfApi | None) -> Staged:
    """Label folders are published as they stand: each split, read back, is a label folder again."""
    parts = {name: folder / name for name in SPLITS if (folder / name / MANIFEST).is_file()}
    if (folder / MANIFEST).is_file():
        parts = {"train": folder}
    if not parts:
        raise ValueError(
            f"folder={str(folder)!r} holds neither a policy (config.json) nor labels "
            f"({MANIFEST}, or label folders named {', '.join(SPLITS)})"
        )
    manifests = {split: _manifest(path) for split, path in parts.items()}
    first = next(iter(parts))
    settings = manifests[first]["settings"]
    for split, one in manifests.items():
        if {**one["settings"], **_FREE} != {**settings, **_FREE}:
            raise ValueError(
                f"{parts[split]} was labelled with other settings than {parts[first]}: publish it "
                "as a data set of its own"
            )
    base, remarks = _find_base(settings["base_model"], settings["base_revision"], release, api)
    if release.license is None:
        remarks.append("no licence is stated: name the data set's with --license")
    empty_folder(out)
    left_out = [] if folder in parts.values() else file_names(folder)
    splits = {}
    for split, part in parts.items():
        prefix = "" if part == folder else f"{split}/"
        left_out += [prefix + name for name in copy_files(part, out / prefix, LABEL_FILES)]
        manifest = scrubbed(manifests[split])
        manifest["settings"] |= {"base_model": base.id, "base_revision": base.revision}
        write_checked(out / prefix / MANIFEST, manifest)
        splits[split] = (prefix, manifests[split])
    write_record(parts[first], out, base, code=False)
    said = {"license": release.license, "problems": release.problems}
    labels_card(splits, name=release.repo, base=base, **said).save(out / CARD_FILE)
    traces = sum(manifest["traces"] for manifest in manifests.values())
    return f"labels: {base.id}, {traces} traces", left_out, remarks


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished label folder whose shards are what it says."""
    manifest = read_manifest(folder)
    if not manifest.get("finished"):
        raise ValueError(f"{folder} is not finished: run its labelling again, it goes on there")
    refuse_other_data(folder, manifest)
    refuse_damage(folder, manifest)
    return manifest


def send(staged: Published, repo: str, private: bool, api: HfApi) -> Published:
    """Brings a repository to the staged folder's state in one commit.

    Files that an earlier publishing put there and this one lacks are deleted in the same commit.
    huggingface_hub retries what it sends; nothing shows before the commit, so that a failure
    leaves the repository as it was (a new one: empty). `upload_folder` would not do: it may commit
    a large folder in batches.

    Raises:
        ValueError, ConnectionError: As `publish`.
    """
    kind = staged.kind
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
            f"publishing {repo} failed ({one_line(error)}): it went up whole or not at all; run "
            "the same command again, which commits what is missing, if anything"
        ) from error
    return replace(staged, commit=done.oid, changed=done.oid != info.sha, url=url)


def _published_files(repo: str, kind: str, api: HfApi) -> list[str]:
    """The files that an earlier publishing put there; a stranger's repository is refused."""
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

    Without `api`, which a dry run has not, it is what the publisher says.

    Raises:
        ValueError: No repository is named, another one than that of the policy, one or a revision
            that the Hub does not have, or one whose weights are not those of the local folder.
    """
    local = not is_hub_id(pinned)
    if local and release.base is None:
        said = (
            f"the base is a local folder ({Path(pinned).name}), which nobody else could load: to "
            "publish, name it on the Hub with --base org/name --base-revision COMMIT"
        )
        if api is None:
            return Base(Path(pinned).name, ""), [said]
        raise ValueError(said)
    if not local and release.base not in (None, pinned):
        raise ValueError(
            f"base={release.base!r}, but it was made with {pinned!r}: leave --base out"
        )
    name = release.base or pinned
    asked = release.base_revision or (None if local else pinned_revision)
    if api is None:
        unpinned = f"the commit of {name} is asked for when it is published, or --base-revision"
        return Base(name, asked or ""), [] if asked else [unpinned]
    info = ask_hub(f"base {name}", name, asked, api)
    said = info.card_data.to_dict() if info.card_data is not None else {}
    license = {key: said[key] for key in ("license", "license_name", "license_link") if key in said}
    known = isinstance(said.get("license"), str) and said["license"] != "unknown"
    found = Base(name, str(info.sha), license if known else {})
    if Path(pinned).is_dir():
        _compare_weights(Path(pinned), found, api)
    pinned_now = f"base {name} is pinned at its present commit {found.revision}"
    return found, [] if asked else [pinned_now]


def _compare_weights(folder: Path, base: Base, api: HfApi) -> None:
    """Refuses a local base whose weights are not those on the Hub, by the first that differs."""
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
