"""Fills the tables of README.md and of these pages from the JSON files of results: `make docs`.

A table stands between two comments, the first of which names what makes it and the files it reads,
or what it reads of a file:

    <!-- table: areas frontier-full.json -->
    <!-- end of table -->
    <!-- table: gaps real-model.json:frontier.gsm8k -->
    <!-- end of table -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ospruner.eval.methods import EVERY_PRICE, FRONTIER, METHOD_NAMES
from ospruner.eval.results import Frontier, Result, Results
from ospruner.eval.text import markdown_table, penalty_name

DOCS = Path(__file__).resolve().parent
PAGES = (DOCS.parent / "README.md", DOCS / "results.md", DOCS / "real-model.md")
Content = Mapping[str, Any]  # of a JSON file
BLOCK = re.compile(
    r"(<!-- table: (?P<kind>[a-z-]+) (?P<files>[^>]+?) -->\n).*?(<!-- end of table -->)", re.DOTALL
)
REAL_SETS = {
    "train": "GSM8K train, to train on",
    "validation": "GSM8K train, validation",
    "gsm8k": "GSM8K test",
    "math500": "MATH-500",
}
SHOWN_EVERY = 6  # of the 31 prices of a policy of every price
SHARES = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
OURS = (FRONTIER, EVERY_PRICE, "OS-Pruner, annealed")
CLASSIFIERS = ("LearnStop", *(name for name in METHOD_NAMES.values() if name != FRONTIER))
SPREAD = {
    "accuracy_points": ("accuracy, points", 2),
    "accuracy_standard_error": ("its standard error", 2),
    "tokens_percent": ("tokens, %", 1),
    "reward_points": ("reward, points", 2),
}


def measures(one: Result) -> list[str]:
    """Accuracy, thinking tokens, reduction and AES of a row."""
    return [
        one.accuracy.text(100, 1),
        one.tokens.text(1, 0),
        one.reduction.text(100, 1),
        one.aes.text(1, 2),
    ]


def named(one: Result, chosen: bool = False) -> str:
    """A row's method and parameter."""
    name = f"{one.method}, {one.parameter_text}" if one.parameter_text else one.method
    return f"**{name}** (chosen on validation)" if chosen else name


def points(file: Content) -> str:
    """Every rule of the file, and the limits."""
    results = Results.from_dict(file)
    rows = [
        [named(one, place == results.chosen), *measures(one)]
        for place, one in enumerate(results.results)
    ]
    rows += [[named(one), *measures(one)] for one in results.limits]
    return markdown_table(["", "accuracy %", "thinking tokens", "reduction %", "AES"], rows)


def next_to_prices(results: Results) -> list[Result]:
    """Of a policy of every price the rows next to the rewards' prices, or else every sixth."""
    ours = [one for one in results.results if one.method == EVERY_PRICE]
    asked = [price for price, _ in results.results[0].rewards]
    near = {min(ours, key=lambda one: abs(float(one.parameter or 0) - price)) for price in asked}
    return [one for one in ours if one in near] if asked else ours[::SHOWN_EVERY]


def at_prices(file: Content) -> str:
    """As `points`; of a policy of every price only some rows, and the chosen one."""
    results = Results.from_dict(file)
    chosen = None if results.chosen is None else results.results[results.chosen]
    shown = [*next_to_prices(results), chosen]
    ours = [one for one in results.results if one.method == EVERY_PRICE and one in shown]
    full, *others = [one for one in results.results if one.method != EVERY_PRICE]
    kept = [full, *ours, *others]
    place = None if chosen is None else kept.index(chosen)
    return points(replace(results, results=kept, chosen=place).to_dict())


def online(file: Content) -> str:
    """What real generation gives: accuracy, tokens and the seconds of each rule's whole answers."""
    rows = [
        [named(one), *measures(one)[:3], one.time_ratio.text(100, 0)]
        for one in Results.from_dict(file).results
    ]
    heads = ["", "accuracy %", "thinking tokens", "reduction %", "seconds, % of the full trace's"]
    return markdown_table(heads, rows)


def served(file: Content) -> str:
    """What a policy costs and saves in vLLM."""

    def ratio(name: str) -> str:
        low, high = file[f"{name}_interval"]
        # The range of rounds: of one round it says nothing.
        return f"{file[name]:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low < high else "")

    rows = [
        ["tokens a second while never stopping, over plain vLLM's", ratio("never_stop_ratio")],
        ["tokens saved, %", f"{100 * file['tokens_saved']:.1f}"],
        ["share of time saved over share of tokens saved", ratio("time_saved_over_tokens_saved")],
    ]
    return markdown_table(["", ""], rows)


def engines(file: Content) -> str:
    """What each engine does a second while it labels."""
    rows = []
    for arm, one in file["arms"].items():
        engine, _, dtype = arm.partition(":")
        rows.append([engine, dtype, f"{one['thinking_tokens_per_second']:.0f}"])
    return markdown_table(["engine", "computes in", "thinking tokens a second"], rows)


def areas(file: Content) -> str:
    """The area under each method's frontier, and what OS-Pruner has more."""
    results = Results.from_dict(file)
    rows = [
        [one.method, one.area.text(100, 1), one.lead.text(100, 1, signed=True) if one.lead else ""]
        for one in results.frontiers
    ]
    return markdown_table(["", "area, %", "area of OS-Pruner minus this one, points"], rows)


def gaps(file: Content) -> str:
    """The share of the gap in reward that each method closes, by price."""
    results = Results.from_dict(file)
    prices = [price for price, _ in results.frontiers[0].gap_closed]
    rows = [
        [one.method, *(share.text(100, 1) for _, share in one.gap_closed)]
        for one in results.frontiers
    ]
    heads = [f"λ={penalty_name(price)}" for price in prices]
    return markdown_table(["% of the gap closed", *heads], rows)


def spread(file: Content) -> str:
    """How far training seeds lie apart, by price."""
    results = Results.from_dict(file)
    rows = [
        [
            name.removeprefix("lam"),
            *(f"{found[key]:.{n}f}" if key in found else "" for key, (_, n) in SPREAD.items()),
        ]
        for name, found in results.about["seed_spread"].items()
    ]
    return markdown_table(["λ", *(head for head, _ in SPREAD.values())], rows)


def readme(of_points: Content, of_areas: Content) -> str:
    """The full trace, ours, the best classifier, rule without training, and budget.

    Ours is the policy that was chosen on validation, or one policy at several prices.
    """
    results, frontiers = Results.from_dict(of_points), Results.from_dict(of_areas)
    by_method = {one.method: one for one in frontiers.frontiers}

    def best(methods: list[str]) -> Frontier:
        return max((by_method[name] for name in methods), key=lambda one: one.area.value)

    def area(one: Frontier) -> str:
        return one.area.text(100, 1)

    full, chosen = results.results[0], results.chosen
    ours = next_to_prices(results) if chosen is None else [results.results[chosen]]
    classifier = best([name for name in by_method if name in CLASSIFIERS])
    untrained = best(
        [
            one.method
            for one in frontiers.frontiers
            if one.method not in (*OURS, *CLASSIFIERS, "fixed budget")
        ]
    )
    tuned = {one.method: one for one in results.results}
    of_classifier = [one for one in results.results if one.method == classifier.method]
    its_rule = tuned.get(f"{classifier.method} (AES)") or max(
        of_classifier, key=lambda one: one.aes.value, default=None
    )
    name, found = classifier.method, ["–"] * 4
    if its_rule is not None:
        name, found = named(replace(its_rule, method=name)), measures(its_rule)
    everything = [*results.results, *results.limits]
    budget = next(one for one in everything if one.method == "best fixed budget")
    rows = [
        [named(full), *measures(full)[:2], "0.0", "0.00", ""],
        *(
            [f"**{named(one)}**", *measures(one), "" if k else area(by_method[one.method])]
            for k, one in enumerate(ours)
        ),
        [f"best classifier: {name}", *found, area(classifier)],
        [f"best rule without training: {untrained.method}", *"––––", area(untrained)],
        [
            f"best budget: {budget.parameter_text}",
            *measures(budget),
            area(by_method["fixed budget"]),
        ],
    ]
    heads = ["", "accuracy %", "thinking tokens", "reduction %", "AES", "area %"]
    return markdown_table(heads, rows)


def real_labels(file: Content) -> str:
    """What the labels of the real model hold, set by set."""
    rows = []
    for name, stats in file["problems"].items():
        tokens = stats["tokens_per_trace"]
        first = {q: 100 * share for q, share in stats["first_right_fraction"].items()}
        rows.append(
            [
                REAL_SETS[name],
                f"{stats['problems']}",
                f"{100 * stats['full_accuracy']:.1f}",
                f"{tokens['0.5']:.0f} ({tokens['0.1']:.0f} to {tokens['0.9']:.0f})",
                f"{stats['steps'] / stats['traces']:.1f}",
                f"{first['0.5']:.0f} % ({first['0.1']:.0f} to {first['0.9']:.0f})",
                f"{100 * stats['right_then_wrong']:.1f}",
            ]
        )
    heads = ["", "problems", "right at the end, %", "thinking tokens (80 % of the traces)"]
    heads += ["steps", "first right after (80 %)", "right at a step, wrong at the end, %"]
    return markdown_table(heads, rows)


def real_growth(file: Content) -> str:
    """How right the answers are that are forced after a share of the real model's trace."""
    rows = []
    for name, stats in file["problems"].items():
        right = dict(zip(stats["fractions"], stats["accuracy_by_fraction"], strict=True))
        rows.append([REAL_SETS[name], *(f"{100 * right[share]:.1f}" for share in SHARES)])
    return markdown_table(["right, %, after", *(f"{100 * s:.0f} %" for s in SHARES)], rows)


def real_costs(file: Content) -> str:
    """What labelling the real model has cost, set by set."""
    rows = []
    for name, stats in file["problems"].items():
        seconds = file["commands"][f"label {name}"]["seconds"]
        rows.append(
            [
                REAL_SETS[name],
                f"{stats['sampling_computed_tokens'] / stats['traces']:.0f}",
                f"{stats['computed_tokens'] / stats['traces']:.0f}",
                f"{seconds / stats['traces']:.1f}",
            ]
        )
    heads = [
        "of a trace",
        "tokens of prompt and thinking",
        "tokens of all forced answers",
        "seconds",
    ]
    return markdown_table(heads, rows)


def real_training(file: Content) -> str:
    """What each later step of the run on the real model took."""
    rows = [
        [name, f"{entry['seconds'] / 60:.0f}"]
        for name, entry in file["commands"].items()
        if name.startswith(("train", "frontier", "replay"))
    ]
    return markdown_table(["", "minutes"], rows)


TABLES: dict[str, Callable[..., str]] = {
    "points": points,
    "at-prices": at_prices,
    "areas": areas,
    "gaps": gaps,
    "spread": spread,
    "readme": readme,
    "real-labels": real_labels,
    "real-growth": real_growth,
    "real-costs": real_costs,
    "real-training": real_training,
    "online": online,
    "served": served,
    "engines": engines,
}


def content_of(name: str) -> Content:
    """What a file holds, or what stands in it under "FILE:KEY.KEY"."""
    file, _, keys = name.partition(":")
    content: Content = json.loads((DOCS / file).read_text("utf-8"))
    for key in filter(None, keys.split(".")):
        content = content[key]
    return content


def filled(text: str) -> str:
    """A page with each table made from its files.

    Raises:
        KeyError: a comment names no table of `TABLES`.
    """

    def fill(found: re.Match[str]) -> str:
        files = [content_of(name) for name in found["files"].split()]
        return found[1] + TABLES[found["kind"]](*files).rstrip("\n") + "\n" + found[4]

    return BLOCK.sub(fill, text)


def main() -> None:
    """Fills the tables of all pages."""
    for page in PAGES:
        page.write_text(filled(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
