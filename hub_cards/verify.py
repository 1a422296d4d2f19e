"""Is a published policy what it says? Its code is read and compared, never run.

Three fixed prompts show that it still says what it said: at publishing, the stop probabilities at
every step end of three written traces are stored in `probes.json`; verifying computes them again
from the repository's weights and the pinned base.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is httpx2's
    HfHubHTTPError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.modeling_ospruner import WEIGHTS
from ospruner.eval.problems.problem import Problem, user_message
from ospruner.eval.problems.task import prompt_token_ids
from ospruner.provenance import (
    PROVENANCE_FILE,
    check_place,
    file_hash,
    read_object,
    read_provenance,
)
from ospruner.scoring import stop_probabilities

from .cards import CARD_FILE, read_policy_config
from .staging import COMMIT, code_files, file_names

PROBES_FILE = "probes.json"
FORMAT_VERSION = 1
# Largest difference in log-odds that another machine explains, by the base's dtype. Probabilities
# themselves would not do: most are small, and near 0 any two policies look alike.
TOLERANCES = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.25}
PROBES = {
    "What is 17 * 23?": (
        "I need 17 * 23.\n\n17 * 20 = 340 and 17 * 3 = 51.\n\nSo 17 * 23 = 340 + 51 = 391.\n\n"
        "Let me check: 391 / 17 = 23. Yes.\n\n"
    ),
    "Solve 3x + 54 = 102 for x.": (
        "Subtract 54 from both sides: 3x = 48.\n\nDivide by 3: x = 16.\n\n"
        "Wait, is 102 - 54 = 48? 54 + 48 = 102, yes.\n\nSo x = 16.\n\n"
    ),
    "How many primes are there below 20?": (
        "The primes are 2, 3, 5, 7, 11, 13, 17, 19.\n\nThat is 8.\n\n"
        "Alternatively: 9 is 3 * 3 and 15 is 3 * 5, so they are out.\n\nThe answer is 8.\n\n"
    ),
}
# git's own, and the card, which its owner may edit on the Hub
_FREE = {".gitattributes", CARD_FILE, PROVENANCE_FILE}


@dataclass(frozen=True)
class Check:
    """One question about a policy, and its answer."""

    question: str  # what was looked at
    ok: bool  # whether it is as it should be
    detail: str  # what was found


def load_policy(folder: Path) -> OSPrunerForCausalLM:
    """A policy's folder with the base that it pins, by the installed code and no other.

    Raises:
        ValueError, OSError: As `OSPrunerForCausalLM.from_pretrained`.
    """
    placed: dict[str, Any] = {"device_map": "auto"} if torch.cuda.is_available() else {}
    return OSPrunerForCausalLM.from_pretrained(folder, dtype="auto", **placed)


def probe(model: OSPrunerForCausalLM) -> dict[str, Any]:
    """What a policy says about the three probes, JSON-ready.

    Raises:
        ValueError: The policy has no tokenizer, or a probability is not a number.
    """
    fmt, tokenizer = model.token_format, model.tokenizer
    if tokenizer is None:
        raise ValueError("model has no tokenizer: load it from the policy's folder")
    opening = list(fmt.think_start_ids)
    answers: list[dict[str, Any]] = []
    for problem, trace in PROBES.items():
        asked = user_message(Problem("probe", problem, ""), fmt.format)
        prompt = prompt_token_ids("probe", asked, tokenizer, fmt)
        if not any(prompt[i : i + len(opening)] == opening for i in range(len(prompt))):
            prompt += opening  # the template leaves that to the base
        thought = tokenizer.encode(trace, add_special_tokens=False)
        one = {"problem": problem, "prompt_ids": prompt, "trace_ids": thought}
        answers.append(one | {"stop_probabilities": _say(model, one)})
    return {"format_version": FORMAT_VERSION, "dtype": _dtype(model), "probes": answers}


def verify(repo: str, revision: str | None = None) -> list[Check]:
    """Check a published policy without running any of its code.

    ```python
    for check in ospruner.verify("org/ospruner-qwen3-8b"):
        print(check.ok, check.question, check.detail)
    ```

    Its code is compared with the installed package's, its files with the recorded hashes; the
    base must be pinned by commit; and weights and base must still say what they said when they
    were published.

    Args:
        repo: Id of a policy on the Hub, or its folder.
        revision: Commit, branch or tag.

    Raises:
        FileNotFoundError, ValueError: There is no such policy, or it was not published by
            OS-Pruner.
        ConnectionError: The Hub cannot be reached.
    """
    if Path(repo).is_dir():
        return verify_folder(Path(repo))
    check_place("policy", repo)
    api = HfApi()
    commit = ask_hub(f"{repo}, which is no folder here,", repo, revision, api).sha
    return verify_folder(Path(snapshot_download(repo, revision=commit, endpoint=api.endpoint)))


def ask_hub(what: str, repo: str, revision: str | None, api: HfApi) -> Any:
    """What the Hub says about a model's repository; `what` names it in errors.

    Raises:
        ValueError: It has no such repository or revision.
        ConnectionError: It cannot be reached.
    """
    try:
        return api.model_info(repo, revision=revision)
    except RevisionNotFoundError as error:
        raise ValueError(f"{what} has no revision {revision!r} on the Hub") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{what} is not on the Hub, or not visible with your token: check the name, publish it "
            "first, or log in with `hf auth login`"
        ) from error
    except (HTTPError, OSError) as error:
        raise ConnectionError(f"the Hub cannot be asked for {what} ({one_line(error)})") from error


def one_line(error: BaseException) -> str:
    """The innermost reason of an error, without the request that led to it."""
    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__


def verify_folder(
    folder: Path, load: Callable[[Path], OSPrunerForCausalLM] = load_policy
) -> list[Check]:
    """Checks a policy's files, as published; `load` loads the policy with its base.

    The weights are loaded by the installed package's code and checked against the base that the
    policy pins; no code of the repository is run, and no pickle is read.

    Raises:
        ValueError: The folder holds no policy, or was not published by OS-Pruner.
    """
    config = read_policy_config(folder)
    record = read_provenance(folder)
    if not record.files:
        raise ValueError(
            f"{PROVENANCE_FILE} names no files, so that there is nothing to verify: the policy was "
            "neither trained by `ospruner train` nor published by `ospruner publish`"
        )
    if not record.code:  # trained, and not published: only its weights are recorded
        return [
            Check(
                f"weights equal the hash in {PROVENANCE_FILE}; not published yet",
                file_hash(folder / WEIGHTS) == record.files[WEIGHTS],
                f"{WEIGHTS}, SHA-256 {record.files[WEIGHTS]}",
            )
        ]
    names = file_names(folder)
    code = _compare(
        {name: file_hash(path) for name, path in code_files().items()},
        {name: file_hash(folder / name) for name in names if name.endswith(".py")},
        "code equals the installed package's",
        ("is not ours", "differs"),
        f". It says that it was published by ospruner {record.code.get('version')}",
    )
    files = _compare(
        {name: hashed for name, hashed in record.files.items() if name not in _FREE},
        {name: file_hash(folder / name) for name in names if name not in _FREE},
        f"files equal the hashes in {PROVENANCE_FILE}",
        ("is not in the record", "was changed"),
    )
    base, revision = config.base_model_name_or_path, config.base_revision
    pinned = COMMIT.fullmatch(revision or "") is not None
    pin = Check("base is pinned by commit", pinned, f"{base} at {revision}")
    return [code, files, pin, _check_probes(folder, load)]


def _compare(
    wanted: Mapping[str, str],
    found: Mapping[str, str],
    question: str,
    words: tuple[str, str],
    remark: str = "",
) -> Check:
    """Whether files, by name and hash, are those that they should be; names each that is not."""
    strange, other = words
    faults = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    faults += [f"{name} {strange}" for name in sorted(found.keys() - wanted.keys())]
    both = sorted(wanted.keys() & found.keys())
    faults += [f"{name} {other}" for name in both if found[name] != wanted[name]]
    detail = "; ".join(faults) + remark if faults else f"{len(both)} files"
    return Check(question, not faults, detail)


def _check_probes(folder: Path, load: Callable[[Path], OSPrunerForCausalLM]) -> Check:
    """Whether the policy still says what is stored, and how far it is from it."""
    question, path = "weights load and say what they said when published", folder / PROBES_FILE
    try:
        if not path.is_file():
            raise ValueError(f"{path} does not exist: the policy was not published by ospruner")
        stored = read_object(path)
        if (version := stored.get("format_version")) != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format_version {version!r}; this version of ospruner reads "
                f"{FORMAT_VERSION}"
            )
        model, probes = load(folder), stored["probes"]
        now = [p for one in probes for p in _say(model, one)]
        then = [p for one in probes for p in one["stop_probabilities"]]
        log_odds = torch.tensor([now, then], dtype=torch.float64).logit(eps=1e-6)
        difference = float((log_odds[0] - log_odds[1]).abs().max())
        tolerated = max(TOLERANCES.get(name, 0.01) for name in (stored["dtype"], _dtype(model)))
    # Whatever is wrong with a stranger's files, it is an answer: SafetensorError is an Exception.
    except Exception as error:  # noqa: BLE001
        return Check(question, False, f"{type(error).__name__}: {error}")
    return Check(
        question,
        difference <= tolerated,
        f"{len(then)} stop probabilities of {len(probes)} probes, log-odds within "
        f"{difference:.2g} (tolerated: {tolerated:g})",
    )


def _say(model: OSPrunerForCausalLM, one: dict[str, Any]) -> list[float]:
    """Stop probabilities at the step ends of one probe, to six digits."""
    ids = [*one["prompt_ids"], *one["trace_ids"]]
    values = stop_probabilities(model, ids, prompt_length=len(one["prompt_ids"]))
    if not bool(torch.isfinite(values).all()):
        raise ValueError(
            f"the policy says {values.tolist()} about {one['problem']!r}: its weights are broken"
        )
    return [float(f"{value:.6g}") for value in values.double().tolist()]


def _dtype(model: OSPrunerForCausalLM) -> str:
    return str(model.base.dtype).removeprefix("torch.")
