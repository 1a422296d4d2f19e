from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modeling_ospruner import OSPrunerConfig
from ospruner.eval.methods import PAPER_THRESHOLDS, parse_policies, refuse_other_base
from ospruner.eval.schema import LabelSettings
from ospruner.formats import DEEPSEEK_R1


def save(folder: Path, method: str = "os-pruner", penalty: float = 1e-4, **more: Any) -> Path:
    more |= {"base_model_name_or_path": "org/base", "base_revision": "abc", "price": penalty}
    more |= {"reasoning_format": DEEPSEEK_R1.to_dict(), "method": method}
    mode = "sample" if method == "os-pruner" else "threshold"
    OSPrunerConfig(default_mode=mode, **more).save_pretrained(folder)
    return folder


def test_os_pruner_draws_and_baselines_have_the_papers_thresholds(tmp_path: Path) -> None:
    ours, probe = save(tmp_path / "ours"), save(tmp_path / "probe", "probe", 0.0)
    first, *uses = parse_policies([str(ours), str(probe)])
    assert (first.method, first.mode) == ("OS-Pruner", "sample")
    assert (first.parameter, first.parameter_name) == (1e-4, "price")
    assert [use.threshold for use in uses] == list(PAPER_THRESHOLDS)
    assert {(use.method, use.mode) for use in uses} == {("probe", "threshold")}
    # Both ways of deciding can be asked for.
    uses = parse_policies([f"{ours}@.3,.5", f"{ours}@sample", f"{probe}@sample"])
    names = {"OS-Pruner (≥0.3)": 0.3, "OS-Pruner (≥0.5)": 0.5, "OS-Pruner": None}
    assert {use.method: use.threshold for use in uses} == {**names, "probe (sampled)": None}


def test_a_folder_of_policies_stands_for_all_of_them(tmp_path: Path) -> None:
    for price in (1e-4, 5e-5):
        save(tmp_path / "run" / f"price{price}", penalty=price)
    (tmp_path / "run" / "logs").mkdir()
    assert [use.parameter for use in parse_policies([str(tmp_path / "run")])] == [1e-4, 5e-5]


def test_bad_policies_are_refused(tmp_path: Path) -> None:
    """Further ones: tests/project/bad_inputs.txt."""
    ours, other = save(tmp_path / "ours"), save(tmp_path / "other", num_policy_layers=3)
    for specs, message in (
        (["dear"], "dear is no folder here; did you mean the rule 'deer'"),
        ([ours, ours], "given twice for OS-Pruner with parameter 0.0001"),
        ([ours, other], "with num_policy_layers 3 and 2: they are no training seeds"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_policies(list(map(str, specs)))


def test_a_policy_for_another_base_is_refused(tmp_path: Path) -> None:
    use = parse_policies([str(save(tmp_path / "ours"))])[0]
    form = DEEPSEEK_R1.to_dict()
    labels = LabelSettings(base_model="org/base", base_revision="abc", reasoning_format=form)
    refuse_other_base(use, labels)
    other = {**form, "box_prefix": "Answer: {"}
    refuse_other_base(use, replace(labels, reasoning_format=other), any_task=True)
    for changes, message in (
        ({"base_model": "org/other"}, "is a policy for org/base at revision abc, the traces are"),
        ({"base_revision": "def"}, "at revision abc, the traces are of org/base at def"),
        ({"reasoning_format": other}, "was trained on traces with box_prefix"),
        ({"task": {"name": "choice"}}, "was trained on the task math, here it is choice"),
        ({"step_stride": 2}, r"decides at every 1\. step, here every 2\."),
    ):
        with pytest.raises(ValueError, match=message):
            refuse_other_base(use, replace(labels, **changes))
