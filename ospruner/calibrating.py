"""`ospruner.calibrate`: a promise about accuracy, found on labels and stored in the policy."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from huggingface_hub import ModelCard
from scipy.optimize import brentq
from scipy.special import rel_entr

from modeling_ospruner.configuration_ospruner import MODES, PriceRange, check_choice, check_number
from modeling_ospruner.modeling_ospruner import WEIGHTS
from ospruner.comparing import Judged
from ospruner.durable import replace_file
from ospruner.eval.calibration import THRESHOLDS, Calibration
from ospruner.eval.calibration import calibrate as boldest
from ospruner.eval.measured import Predicted, measure
from ospruner.eval.methods import PolicyUse, parse_policies, price_grid, refuse_other_base
from ospruner.eval.problems.domains import open_task
from ospruner.eval.problems.problem import text_key
from ospruner.eval.replay import Outcome, replay, replay_full, stop_weights
from ospruner.eval.table import TraceTable
from ospruner.hub_cards.cards import CARD_FILE, policy_card
from ospruner.progress import Progress, silent
from ospruner.provenance import file_hash, read_provenance
from ospruner.rules.families import Family, StopRule, is_rule, parse_rule
from ospruner.serving.drift import answers_differ, distribution
from ospruner.serving.requests import EFFORTS

__all__ = ["CAREFUL", "PRICE_THRESHOLD", "SHARES", "Value", "calibrate", "tried"]

PRICE_THRESHOLD = 0.5
"""The stop probability at which a policy of every price is indifferent."""

Value = float | tuple[float, float]
"""What can be tried: a threshold of a policy of one price; of one of every price a price, at which
it stops from `PRICE_THRESHOLD` on, or a price and another threshold."""

Setting = tuple[float | None, float | None]
"""Price, None of a policy of one price, and threshold, None where it draws."""

CAREFUL: tuple[Value, ...] = tuple((0.0, threshold) for threshold in (0.95, 0.9, 0.8, 0.7, 0.6))
"""More careful than every price."""

SHARES = dict(zip(EFFORTS, (0.25, 0.5, 0.7, 0.85, 0.95, 1.0), strict=True))
"""Of the full traces' thinking tokens, what each effort may take."""


def calibrate(
    policy: str | Path | Family | Callable[..., Any],
    labels: Any,
    max_loss: float,
    confidence: float = 0.95,
    *,
    mode: Literal["threshold", "sample"] = "threshold",
    values: Sequence[Value] | None = None,
    base: str | None = None,
    device: str | None = None,
    states: str | Path | None = None,
    looks: int = 1,
    efforts: Mapping[str, float] | None = None,
    progress: Progress = silent,
) -> Calibration:
    """Finds the boldest setting that keeps a promise, and stores it in the policy's folder.

    Beside it the settings that a server takes for `reasoning_effort` are found and stored: of those
    that were tried, for each effort the most careful one that takes no more than its share of the
    full traces' tokens, or else the boldest.

        ospruner.calibrate("policy", labels["validation"], max_loss=0.02)

    The setting is the threshold of a policy of one price, or the price of a policy of every price.
    This one then stops where the stop probability is one half or more, that is, where the price of
    indifference is no higher; in mode "sample" it draws, and the losses tested are replay's
    expectations over its draws.

    Args:
        policy: its folder; where a setting passes, `config.json` and the card `README.md` say so.
            Or a rule without training, whose threshold is found and returned: `rules.Deer`, "deer",
            a function of a step's end.
        labels: as for `compare`, or such as are judged already; the policy was trained on none of
            their problems, which are told apart by their text.
        max_loss: the accuracy that may be lost, as a share, against the answers forced at the full
            traces' ends. The base's own answers there are told beside it.
        confidence: how surely not more is lost.
        mode: in which the policy is to stop.
        values: to try, from careful to bold (`Value`): thresholds falling, or prices rising. None:
            `THRESHOLDS`, or 31 prices of the policy's range; a rule's must be given.
        base: the base, where it lies elsewhere than when it was labelled.
        device: on which it computes; None for the best.
        states: folder in which the trunk's states are kept.
        looks: how often in all growing labels are calibrated on; see `eval.calibration.calibrate`.
        efforts: by a name of `EFFORTS`, its share of the full traces' thinking tokens, in place of
            that in `SHARES`.
        progress: called with phases "trunk" and "policies".

    Returns:
        What was found; `value` is None where no setting keeps the promise, and none is stored.

    Raises:
        ValueError: no policy there or another base's, problems that it was trained on, labels of
            free answers, settings in another order, mode "sample" of a policy of one price, or an
            effort or share that is none.
    """
    check_choice("calibrate", "mode", mode, MODES)
    shares = SHARES | dict(efforts or {})
    for name, share in shares.items():
        check_choice("calibrate", "an effort", name, EFFORTS)
        check_number("calibrate", f"the share of effort {name}", share, 0, 1)
    if not isinstance(policy, str | Path) or (is_rule(str(policy)) and not Path(policy).is_dir()):
        return _of_rule(policy, values, labels, max_loss, confidence, mode)
    folder, ours = Path(policy), labels
    use = parse_policies([f"{folder}@{PRICE_THRESHOLD}"])[0]
    if not isinstance(ours, Judged):
        ours = Judged(labels, base, device=device, states=states, progress=progress)
    _refuse_labels(ours)
    known = use.config.prices
    if mode == "sample" and known is None:
        raise ValueError(
            f"mode is 'sample', but {folder} is a policy of one price, whose draws have no "
            "setting to calibrate: leave it out (a threshold is found), or train one of every "
            "price (ospruner train --head price)"
        )
    _settings(values, known, mode)  # refuses before anything is computed
    refuse_other_base(use, ours.settings)
    _refuse_own(folder, use, ours)
    table, outcomes = tried(ours, use, mode, values)
    salt = f"{file_hash(folder / WEIGHTS)}/{ours.labels.data_hash}"
    numbered = [(float(place), outcome) for place, (_, outcome) in enumerate(outcomes)]
    found = boldest(table, numbered, max_loss, confidence, salt=salt, looks=looks)
    promise = None
    if found.value is not None:
        price, threshold = kept = outcomes[int(found.value)][0]
        own = None if price is None or threshold == PRICE_THRESHOLD else threshold
        found = replace(found, value=threshold if price is None else price, threshold=own)
        said = ours.predicted(use.path)
        chosen = said.probabilities(price), threshold
        stops, level = stop_weights(table, *chosen), (1 - confidence) / 2 / len(outcomes)
        facts = ("loss", "tokens_saved", "problems", "test", "full_accuracy", "natural_accuracy")
        promise = {name: vars(found)[name] for name in facts} | {
            "max_loss": max_loss,
            "confidence": confidence,
            **_stored(mode, kept),
            "data_hash": ours.labels.data_hash,
            "disagreement": _disagreement(ours, table, stops, level),
            "traffic": _traffic(table, said, stops),
        }
    full, dial = replay_full(table), dict[str, dict[str, Any]]()
    for name in EFFORTS:
        most = shares[name] * full.mean_tokens
        careful = (one for one in outcomes if one[1].mean_tokens <= most)
        setting, outcome = next(careful, outcomes[-1])
        dial[name] = _stored(mode, setting) | {
            "tokens": round(outcome.mean_tokens, 4),
            "share": round(outcome.mean_tokens / full.mean_tokens, 4),
            "loss": round(full.accuracy - outcome.accuracy, 4),
        }
    _store(folder, promise, dial)
    return replace(found, efforts=dial)


def tried(
    ours: Judged, use: PolicyUse, mode: str = "threshold", values: Sequence[Value] | None = None
) -> tuple[TraceTable, list[tuple[Setting, Outcome]]]:
    """What a policy does on labels at each setting that a calibration tries, from careful to bold.

    Mode and values are those of `calibrate`.
    """
    said, table = ours.predicted(use.path), TraceTable.from_dataset(ours.traces)
    return table, [
        ((price, threshold), replay(table, said.probabilities(price), threshold))
        for price, threshold in _settings(values, use.config.prices, mode)
    ]


def _settings(values: Sequence[Value] | None, known: PriceRange | None, mode: str) -> list[Setting]:
    """What values mean; raises ValueError where they do not stand from careful to bold."""
    if values is None:
        values = THRESHOLDS if known is None else price_grid(known)
    what = "numbers in [0, 1] from careful (high) to bold (low)"
    pairs: list[tuple[float | None, Any]] = [(None, one) for one in values]
    if known is not None:
        what = "prices of a token from careful (low) to bold (high)"
        pairs = [one if isinstance(one, tuple) else (one, PRICE_THRESHOLD) for one in values]
        for price, _ in pairs:
            known.check("calibrate", price)
    fit = all(not isinstance(one, tuple) and 0 <= one <= 1 for _, one in pairs)
    found = [(price, None if mode == "sample" else one) for price, one in pairs]
    rises = [(price or 0.0, -(one or 0.0)) for price, one in found] if fit else []
    if not rises or rises != sorted(set(rises)):
        raise ValueError(f"values is {list(values)}; give {what}, each once")
    return found


def _stored(mode: str, setting: Setting) -> dict[str, Any]:
    """A setting as the configuration holds it."""
    return {"mode": mode, "threshold": setting[1], "price": setting[0]}


def _of_rule(
    rule: Any,
    values: Sequence[Value] | None,
    labels: Any,
    max_loss: float,
    confidence: float,
    mode: str,
) -> Calibration:
    """The boldest threshold of a rule without training that keeps a promise."""
    kind = parse_rule(str(rule)) if isinstance(rule, str | Path) else Family.of(rule)
    if isinstance(kind, StopRule):
        raise ValueError(f"{kind!r} has a threshold: give the name alone, and values to try")
    if mode != "threshold":
        raise ValueError(
            f"mode is {mode!r}; a rule such as {kind.name} does not draw: leave it out"
        )
    numbers = [one for one in values or () if not isinstance(one, tuple)]
    if values is None or len(numbers) < len(values):
        raise ValueError(f"{kind.name} is a rule: give values to try, from careful to bold")
    ours = Judged(labels)
    _refuse_labels(ours)
    chosen = [kind(value) for value in numbers]
    found, table = measure(ours.split, kind), ours.split.table
    outcomes = [(one.threshold, found.outcome(table, one)) for one in chosen]
    salt = f"{kind.name}/{ours.labels.data_hash}"
    return boldest(table, outcomes, max_loss, confidence, salt=salt)


def _refuse_labels(ours: Judged) -> None:
    if ours.settings.answer != "forced":
        raise ValueError(
            f"{ours.name} hold {ours.settings.answer} answers; a promise is about forced ones: "
            "label with --answer forced"
        )
    if open_task(ours.settings.task).labels_expect:
        raise ValueError(
            f"{ours.name} hold probabilities of right answers, and a promise is about answers that "
            "are right or wrong: label anew with --task choice:labels=letter"
        )


def _refuse_own(folder: Path, use: PolicyUse, ours: Judged) -> None:
    """Refuses labels forced after another sentence, and those that the policy was trained on."""
    formats = (use.config.reasoning_format or {}, ours.settings.reasoning_format)
    own, theirs = (literals.get("wind_down", "") for literals in formats)
    if own != theirs:
        raise ValueError(
            f"{folder} stops with wind_down {own!r}, the answers of {ours.name} were forced after "
            f"{theirs!r}: a promise holds for the policy's own; label with it"
        )
    record, again = read_provenance(folder), set(ours.traces["problem"])
    trained_on, domains = (record.details.get(name) for name in ("trained_on", "domains"))
    if trained_on is not None:
        known = set(trained_on.split())
        again = {one for one in again if text_key(one) in known}
    elif ours.labels.data_hash not in (record.data_hash, *(domains or {}).values()):
        again = set()  # a policy of the first days knows no texts, its data alone
    if again:
        raise ValueError(
            f"{len(again)} problems of {ours.name} are among those that {folder} was trained on, "
            f"under whatever id, such as {min(again)[:60]!r}: what it does there says nothing "
            "about new ones; label others (--set exclude=FILE leaves problems out)"
        )


def _traffic(
    table: TraceTable, said: Predicted, weights: npt.NDArray[np.float64]
) -> dict[str, Any]:
    """How the calibration's traces are distributed, which a server compares its own with.

    Weights (N, T) are how probably each trace stops at each step.
    """
    first = said.probabilities() if said.indifference is None else said.indifference
    decided = first[table.num_steps > 1, 0].astype(np.float64)
    real = weights > 0
    return {
        "problems": len(table.problem_ids),
        "thinking_tokens": distribution(table.lengths[real].astype(np.float64), weights[real]),
        "first_step": distribution(decided, np.ones(len(decided))),
    }


def _disagreement(
    ours: Judged, table: TraceTable, weights: npt.NDArray[np.float64], level: float
) -> float:
    """How often answers at the stop differ from those at the end, at the most, as a server sees it.

    The mean m over n problems is exceeded so far with probability `level` at most: the bound u has
    n KL(m, u) = ln(1 / level) (Hoeffding 1963, theorem 1), whatever the values in [0, 1]. Weights
    are those of `_traffic`.
    """
    differ = np.zeros_like(weights)
    for row, answers in zip(differ, ours.traces["forced_answers"], strict=True):
        row[: len(answers)] = [answers_differ(one, answers[-1]) for one in answers]
    problems = table.by_problem((weights * differ).sum(axis=1))
    mean = float(problems.mean())
    most = 1 - 1e-9

    def excess(bound: float) -> float:
        apart = rel_entr(mean, bound) + rel_entr(1 - mean, 1 - bound)
        return len(problems) * float(apart) + math.log(level)

    return round(brentq(excess, mean, most), 6) if mean < most and excess(most) > 0 else 1.0


def _store(
    folder: Path, promise: Mapping[str, Any] | None, efforts: Mapping[str, Mapping[str, Any]]
) -> None:
    """Puts efforts, and a promise in the place of an earlier equal one, into the configuration.

    The card, which states it, is written anew; its licence stays.
    """
    path, card = folder / "config.json", folder / CARD_FILE
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config["efforts"] = efforts
    if promise is not None:
        goal = itemgetter("max_loss", "confidence")
        others = [one for one in config.get("calibrations") or () if goal(one) != goal(promise)]
        config["calibrations"] = sorted([*others, promise], key=itemgetter("max_loss"))
    replace_file(path, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
    told = ModelCard.load(card).data.to_dict() if card.is_file() else {}
    license = {key: value for key, value in told.items() if key.startswith("license")}
    policy_card(folder, name=folder.name, license=license).save(card)
