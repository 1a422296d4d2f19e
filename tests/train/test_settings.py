"""Schedules and optimiser settings, and which are refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from modeling_ospruner import OSPrunerConfig, OSPrunerForCausalLM
from modeling_ospruner.policy_ospruner import StoppingPolicy
from ospruner.cli.serving import doctor_plan
from ospruner.cli.training import train_command
from ospruner.doctor.plan import Workload
from ospruner.train.settings import TrainSettings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length_penalties": ()}, "length_penalties is empty"),
        ({"length_penalties": (1e-4, 1e-3)}, "must fall strictly"),
        ({"length_penalties": (1e-3, 1e-3)}, "must fall strictly"),
        ({"length_penalties": (1e-3, -1e-4)}, r"holds \[-0\.0001\]; each lambda must be"),
        ({"length_penalties": (float("nan"),)}, "each lambda must be finite"),
        ({"length_penalties": (1.00000001e-3, 1e-3)}, "too close to tell apart"),
        ({"method": "probe"}, "has no length penalty"),
        ({"method": "halt"}, "method is 'halt'"),
        ({"verifier": "org/judge"}, "verifier is 'org/judge', but only 'flashthink' has one"),
        ({"epochs_per_stage": 0}, "epochs_per_stage is 0; it must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be finite and > 0"),
        ({"head_learning_rate": -1.0}, "head_learning_rate is -1.0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"entropy_bonus": float("nan")}, "entropy_bonus is nan; it must be finite and >= 0"),
        (
            {"method": "probe", "length_penalties": (), "entropy_bonus": 0.01},
            "entropy_bonus is 0.01, but method 'probe' is a classifier",
        ),
        ({"auxiliary_weight": -1.0}, "auxiliary_weight is -1.0; it must be finite and >= 0"),
        (
            {"auxiliary_targets": ("run", "luck")},
            r"auxiliary_targets is \['run', 'luck'\]; it must",
        ),
        ({"auxiliary_targets": ()}, r"auxiliary_targets is \[\]; it must hold some of repeats"),
        (
            {"auxiliary_weight": 0.1, "tuning": "head"},
            "auxiliary_weight is 0.1, but tuning 'head' has no tail",
        ),
        (
            {"auxiliary_weight": 0.1, "method": "probe", "length_penalties": ()},
            "auxiliary_weight is 0.1, but method 'probe'",
        ),
        ({"final_learning_rate_share": 1.5}, "final_learning_rate_share is 1.5"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings(**{"length_penalties": (1e-3, 0.0)} | changes)


def test_count_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"batch_size is 1\.5; it must be an integer"):
        TrainSettings(length_penalties=(0.0,), batch_size=1.5)  # type: ignore[arg-type]


def test_stages_and_baselines_of_equal_length() -> None:
    settings = TrainSettings(
        length_penalties=[1e-3, 2.5e-5, 0], epochs_per_stage=4, entropy_bonus=0.01, seed=7
    )
    stages = [(stage.name, stage.price, stage.epochs) for stage in settings.stages]
    assert stages == [("lam1e-3", 1e-3, 4), ("lam2.5e-5", 2.5e-5, 4), ("lam0", 0.0, 4)]
    probe = settings.baseline("probe")
    assert [(stage.name, stage.epochs) for stage in probe.stages] == [("probe", 12)]
    assert (probe.total_epochs, probe.seed) == (settings.total_epochs, 7)
    assert probe.entropy_bonus == 0


def test_a_longer_first_stage_counts_in_every_target() -> None:
    settings = TrainSettings(
        length_penalties=[1e-3, 1e-4, 0], epochs_per_stage=2, first_stage_epochs=5
    )
    assert [stage.epochs for stage in settings.stages] == [5, 2, 2]
    epochs = {name: [s.epochs for s in one.stages] for name, one in settings.targets().items()}
    assert epochs == {
        "lam1e-3": [9],
        "lam1e-4": [5, 4],
        "lam0": [5, 2, 2],
        "probe": [9],
        "convergence": [9],
    }


def test_the_default_tuning_is_the_same_wherever_one_is_chosen() -> None:
    """A configuration without the key stands for the paper's layers, as it always has."""
    made = (OSPrunerForCausalLM.untrained, StoppingPolicy.from_base, TrainSettings)
    asked = (*made, train_command, doctor_plan, Workload)
    defaults = {inspect.signature(one).parameters["tuning"].default for one in asked}
    assert defaults == {"queries"}
    assert OSPrunerConfig().tuning == "layers"
