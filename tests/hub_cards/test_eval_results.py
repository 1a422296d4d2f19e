"""The Hub's own results of a published policy: `.eval_results/*.yaml`."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from huggingface_hub import HfApi, ModelCard, hf_hub_download, parse_eval_result_entries

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.demo.shipped import Reasoner
from ospruner.eval.results import RESULTS_FILE, Results
from ospruner.hub_cards.measurements import write_eval_results
from ospruner.hub_cards.policies import PolicyRelease, send_policy, stage_policy

from ..made_results import make_result
from .local_hub import LocalHub
from .repositories import Repo

EVAL_YAML = """
name: Sums
description: Sums of two numbers.
evaluation_framework: math-arena
tasks:
"""


@pytest.fixture
def benchmark(hub: LocalHub, tmp_path: Path) -> Repo:
    """A benchmark of two tasks, as the Hub registers one."""
    folder = tmp_path / "benchmark"
    folder.mkdir()
    (folder / "eval.yaml").write_text(EVAL_YAML + "  - id: easy\n  - id: hard\n", "utf-8")
    return hub.add("dataset", "org/sums", folder)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A folder with results, in which the second rule is the policy."""
    folder = tmp_path / "run"
    folder.mkdir()
    rules = [make_result("Full", 0.7, 200), make_result("OS-Pruner", 0.6543217, 100, 5e-4, "λ")]
    Results(dataset="Sums", setting="toy, replay", results=rules, chosen=1).save(
        folder / RESULTS_FILE
    )
    return folder


def test_published_policy_carries_its_result(
    policy_dir: Path,
    tmp_path: Path,
    api: HfApi,
    reasoner: Reasoner,
    base_repo: Repo,
    benchmark: Repo,
    run_dir: Path,
) -> None:
    folder = Path(shutil.copytree(policy_dir, tmp_path / "policy"))
    shutil.copyfile(run_dir / RESULTS_FILE, folder / RESULTS_FILE)
    release = PolicyRelease(
        "org/ranked", base="org/base", base_revision=base_repo.head.oid, benchmark="org/sums:hard"
    )

    def load(path: Path) -> OSPrunerForCausalLM:
        return OSPrunerForCausalLM.from_base(reasoner.model, path)

    repo_id, staged = stage_policy(folder, tmp_path / "staged", release, api, load)
    send_policy(staged, repo_id, private=False, collection=None, api=api)
    path = hf_hub_download(
        repo_id, ".eval_results/org-sums-hard.yaml", endpoint=api.endpoint, token=api.token
    )
    (entry,) = parse_eval_result_entries(yaml.safe_load(Path(path).read_text("utf-8")))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("org/sums", "hard", 65.4322)
    assert entry.dataset_revision == benchmark.head.oid
    assert entry.source_url == f"{api.endpoint}/org/ranked/blob/main/results.json"
    assert api.file_exists(repo_id, RESULTS_FILE)
    for part in ("65.4 [63.4, 67.4]", "OS-Pruner λ=5e-4", "100 thinking", "50.0 % saved", "toy"):
        assert part in str(entry.notes), part
    card = ModelCard.load(staged.path / "README.md").data.to_dict()
    assert card["base_model_relation"] == "adapter"
    assert card["library_name"] == "transformers"
    (example,) = card["widget"]
    (message,) = example["messages"]
    assert message["role"] == "user"
    assert message["content"].startswith("What is 17 * 23?\n\nPlease reason step by step")


def test_only_task_needs_no_name(run_dir: Path, hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "eval.yaml").write_text(EVAL_YAML + "  - id: default\n", "utf-8")
    hub.add("dataset", "org/one", folder)
    written = write_eval_results(run_dir, "org/one", "org/policy", api)
    assert written.name == "org-one-default.yaml"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("org/sums", r"tasks of org/sums are \['easy', 'hard'\]"),
        ("org/sums:medium", r"tasks of org/sums are \['easy', 'hard'\]"),
        ("org/nowhere", "no data set on the Hub"),
        ("org/plain", "no benchmark: it has no eval.yaml"),
    ],
)
def test_what_the_hub_would_not_show_is_refused(
    run_dir: Path,
    hub: LocalHub,
    api: HfApi,
    benchmark: Repo,
    tmp_path: Path,
    name: str,
    complaint: str,
) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "README.md").write_text("A data set.", "utf-8")
    hub.add("dataset", "org/plain", plain)
    with pytest.raises(ValueError, match=complaint):
        write_eval_results(run_dir, name, "org/policy", api)
    assert not (run_dir / ".eval_results").exists()


def test_results_of_no_policy_are_refused(run_dir: Path, api: HfApi) -> None:
    path = run_dir / RESULTS_FILE
    dataclasses.replace(Results.read(path), chosen=None).save(path)
    with pytest.raises(ValueError, match="has no results.json that names the policy"):
        write_eval_results(run_dir, "org/sums", "org/policy", api)
    path.unlink()
    with pytest.raises(ValueError, match="leave --benchmark out"):
        write_eval_results(run_dir, "org/sums", "org/policy", api)
