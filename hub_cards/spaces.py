"""Publishing a Space: the page of `ospruner app` for a published policy, with the code it needs.

The Space carries its code, as a policy's repository does: it needs no release of this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import jinja2
from huggingface_hub import HfApi, SpaceCard, SpaceCardData, hf_hub_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is httpx2's
    EntryNotFoundError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

import modeling_ospruner
from modeling_ospruner.modeling_ospruner import FLAT_FILES
from ospruner.provenance import provenance, read_provenance

from .names import check_repo_id, collection_title
from .publish import Published, add_to_collection, commit_message, publish_folder
from .render import CARD_FILE, read_policy_config
from .staging import Staged, seal

__all__ = ["SPACE_CODE", "SpaceRelease", "send_space", "stage_space"]

SPACE_CODE = (
    "__init__.py",
    *FLAT_FILES,
    "common/__init__.py",
    "common/optional.py",
    "app/__init__.py",
    "app/columns.py",
    "app/page.css",
    "app/page.py",
    "app/turns.py",
)
"""Files of the package that the page needs where its policy runs in the Space itself."""

_PACKAGES = ("torch", "transformers", "safetensors", "accelerate", "peft")
_GRADIO = "6.31.0"  # as in the extra `app`
_CODE_FOLDER = Path(modeling_ospruner.__file__).parent
_TEMPLATE = Path(__file__).with_name("space_card.md")
_APP = '''"""The page of OS-Pruner for {policy}."""

from ospruner.app.page import open_app, open_source

open_app(open_source({policy!r}, revision={revision!r}))
'''


@dataclass(frozen=True)
class SpaceRelease:
    """What a publisher says about a Space.

    Attributes:
        repo: `owner/name`; `owner/` alone takes the policy's name.
        policy: The policy's id on the Hub.
        revision: Its commit, branch or tag; resolved to a commit. None for the present head.
        hardware: What the Space's README suggests, in the Hub's spelling; None for nothing.
    """

    repo: str
    policy: str
    revision: str | None = None
    hardware: str | None = None


def stage_space(out: Path, release: SpaceRelease, api: HfApi) -> tuple[str, Staged]:
    """Writes the exact folder that is published; nothing is sent.

    Args:
        out: Where to write; an empty or missing folder.
        release: What its publisher says.
        api: The Hub, to pin the policy and read what it is.

    Returns:
        The Space's id, and the staged folder.

    Raises:
        ValueError: The policy is not on the Hub, or is none; or `out` is not empty.
        ConnectionError: The Hub cannot be reached.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"out={str(out)!r} is not empty: delete it, or choose another folder")
    base, revision = _find_policy(release, api)
    repo_id = check_repo_id(release.repo, release.policy.rpartition("/")[2])
    for name in SPACE_CODE:
        target = out / "modeling_ospruner" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((_CODE_FOLDER / name).read_bytes())
    app = _APP.format(policy=release.policy, revision=revision)
    (out / "app.py").write_text(app, encoding="utf-8")
    pinned = [f"{name}=={metadata.version(name).partition('+')[0]}" for name in _PACKAGES]
    (out / "requirements.txt").write_text("\n".join([*pinned, ""]), encoding="utf-8")
    _write_card(out, release, base, revision)
    provenance(out, seed=None, base_model=base, details={"policy": release.policy,
               "revision": revision})  # fmt: skip
    seal(out)
    remarks = []
    if release.hardware is None:
        remarks.append(
            "the Space runs on two CPU cores until you choose other hardware in its settings; "
            "--hardware suggests some to those who copy it"
        )
    return repo_id, Staged(out, [], remarks)


def send_space(
    staged: Staged, repo_id: str, *, private: bool, collection: str | None, api: HfApi
) -> tuple[Published, str | None]:
    """Publishes a staged Space, and puts it into a collection where one is named.

    Args:
        staged: From `stage_space`.
        repo_id: From `stage_space`.
        private: Make the Space a private one.
        collection: Title or slug; "auto" for the one of the base's family.
        api: The Hub.

    Returns:
        What was done, and the collection's address.

    Raises:
        ValueError, ConnectionError: As `publish_folder` and `add_to_collection`.
    """
    message = commit_message("page", [repo_id])
    done = publish_folder(staged, repo_id, "space", private=private, message=message, api=api)
    if collection is None:
        return done, None
    if collection == "auto":
        collection = collection_title(str(read_provenance(staged.path).base_model))
    return done, add_to_collection(collection, repo_id, "space", None, api)


def _find_policy(release: SpaceRelease, api: HfApi) -> tuple[str, str]:
    """The policy's base, and its commit.

    Raises:
        ValueError: There is no such policy on the Hub.
        ConnectionError: The Hub cannot be reached.
    """
    if Path(release.policy).exists():
        raise ValueError(
            f"policy={release.policy!r} is a folder of this machine, which a Space cannot load: "
            "publish it first (ospruner publish policy), and name its id"
        )
    check_repo_id(release.policy, "name")
    try:
        commit = str(api.model_info(release.policy, revision=release.revision).sha)
        config = hf_hub_download(
            release.policy, "config.json", revision=commit, endpoint=api.endpoint, token=api.token
        )
    except RevisionNotFoundError as error:
        raise ValueError(f"{release.policy} has no revision {release.revision!r}") from error
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise ValueError(
            f"policy={release.policy!r} is no policy on the Hub, or not visible with your token: "
            "publish it first (ospruner publish policy), and name its id"
        ) from error
    except HTTPError as error:
        raise ConnectionError(f"the Hub cannot be reached ({error}): try again") from error
    return str(read_policy_config(Path(config).parent)["base_model_name_or_path"]), commit


def _write_card(out: Path, release: SpaceRelease, base: str, revision: str) -> None:
    name = release.policy.rpartition("/")[2]
    title = f"OS-Pruner: {name}"
    data = SpaceCardData(
        title=title, sdk="gradio", sdk_version=_GRADIO, app_file="app.py",
        python_version="3.11", emoji="✂️", colorFrom="yellow", colorTo="gray", pinned=False,
        models=[release.policy, base], tags=["ospruner", "reasoning", "early-exit"],
        short_description="A reasoning model, as it is and stopped in time",
        suggested_hardware=release.hardware,
    )  # fmt: skip
    text = jinja2.Template(_TEMPLATE.read_text(encoding="utf-8"), autoescape=False).render(
        title=title, base=base, policy=release.policy, revision=revision,
        version=metadata.version("ospruner"),
    )  # fmt: skip
    SpaceCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(out / CARD_FILE)
