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
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ospruner.eval.learnstop import LEARN_STOP
from ospruner.eval.methods import EVERY_PRICE, FRONTIER, FULL, METHOD_NAMES, ORACLE
from ospruner.eval.report.summary import ANSWERS
from ospruner.eval.report.tables import MAIN, Column, Table
from ospruner.eval.results import Estimate, Results, markdown_table, price_name, prices_of

DOCS = Path(__file__).resolve().parent
PAGES = tuple(
    DOCS / one
    for one in ("../README.md", "real-model.md", "numbers.md", "bases.md", "serving.md", "eval.md")
)
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
CLASSIFIERS = [name for name in METHOD_NAMES.values() if name != FRONTIER] + [LEARN_STOP.method]
SPREAD = {
    "accuracy_points": ("accuracy, points", 2),
    "accuracy_standard_error": ("its standard error", 2),
    "tokens_percent": ("tokens, %", 1),
    "reward_points": ("reward, points", 2),
}


def named(one: pd.Series, chosen: bool = False) -> str:
    """A row's method and parameter."""
    name = f"{one['method']}, {one['setting']}" if one["setting"] else one["method"]
    return f"**{name}** (chosen on validation)" if chosen else name


def shown(results: Results, frame: pd.DataFrame) -> str:
    """Some rows of the results."""
    labels = [named(one, place == results.chosen) for place, one in frame.iterrows()]
    return Table.of(frame, MAIN, labels, corner="").markdown()


def next_to_prices(results: Results) -> pd.DataFrame:
    """Of a policy of every price the rows next to the rewards' prices, or else every sixth."""
    ours = results.rules[results.rules["method"] == EVERY_PRICE]
    prices = prices_of(ours, "reward") if len(ours) else {}
    near = {(ours["parameter"] - price).abs().idxmin() for price in prices}
    return ours.loc[sorted(near)] if prices else ours[::SHOWN_EVERY]


def at_prices(file: Content, every: bool = True) -> str:
    """Every rule of the file and the limits; of a policy of every price the chosen row and some."""
    results = Results.from_dict(file)
    rules = results.rules
    ours = rules["method"] == EVERY_PRICE
    wanted = rules.index.isin(next_to_prices(results).index) | (rules.index == results.chosen)
    others = rules[~ours][1:]
    if not every:
        others = others[others["chosen"].astype(bool)]
    return shown(
        results, pd.concat([rules[~ours][:1], rules[ours & wanted], others, results.limits])
    )


def at_chosen(file: Content) -> str:
    """The same with the chosen settings of other rules alone."""
    return at_prices(file, every=False)


def online(file: Content) -> str:
    """What real generation gives: accuracy, tokens and the seconds of each rule's whole answers."""
    rules = Results.from_dict(file).rules
    columns = (*MAIN[:3], Column("seconds, % of the full trace's", "time_ratio", 100))
    labels = [named(one) for _, one in rules.iterrows()]
    return Table.of(rules, columns, labels, corner="").markdown()


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


def speed(*files: Content) -> str:
    """What vLLM with a policy does over plain vLLM, at each number of streams."""

    def ratio(file: Content, name: str) -> str:
        low, high = file[f"{name}_interval"]
        return f"{file[name]:.3f} [{low:.3f}, {high:.3f}]"

    columns = {"28 layers of width 512": "", "embedded reasoner (6 layers)": "_reasoner"}
    rows = []
    for file in files:
        at = f"{file['streams']} streams: " if file["streams"] > 1 else "1 stream: "
        for said, name in (
            ("tokens/s over plain vLLM, policy never stops", "never_stop_ratio"),
            ("time saved over tokens saved", "time_saved_over_tokens_saved"),
        ):
            rows.append([at + said, *(ratio(file, name + key) for key in columns.values())])
        saved = [f"{100 * file[f'tokens_saved{key}']:.1f}" for key in columns.values()]
        rows.append([f"{at}tokens saved by a budget, %", *saved])
    return markdown_table(["a policy of queries only", *columns], rows)


def latency(file: Content) -> str:
    """What a server's clients wait, policy off and on, in ms."""
    rows = []
    for base, told in (("28 layers of width 256", "random"), ("embedded reasoner", "reasoner")):
        for streams, arms in file[told].items():
            for arm, said in (("off", "off"), ("never", "on, never stops"), ("on", "stops early")):
                one = arms[arm]
                times = [f"{one[f'{name}_p50_ms']:,.0f}" for name in ("ttft", "tpot", "e2el")]
                rows.append([base, streams, said, *times, f"{one['generated_tokens']:,}"])
    head = ["to the first token", "a further token", "whole request", "tokens in all"]
    return markdown_table(["base", "streams", "policy", *head], rows)


def after_cut(*files: Content) -> str:
    """Answers after a stop and after the model's own end, where the model writes them freely."""
    found = [Results.from_dict(file) for file in files]
    frame = pd.concat([one.rules for one in found])
    labels = [
        f"{one.settings['model']}: {named(row)}" for one in found for _, row in one.rules.iterrows()
    ]
    columns = (*MAIN[:2], *ANSWERS, Column("all tokens saved %", "total_reduction", 100, 1))
    return Table.of(frame, columns, labels, corner="").markdown()


def bases(file: Content) -> str:
    """On which bases a policy is right, and why others are refused."""
    columns = {"queries": "queries", "layers": "layers", "vllm": "vLLM", "sglang": "SGLang"}
    rows = [[name, *(one.get(key, "not run") for key in columns)] for name, one in file.items()]
    return markdown_table(["base", *columns.values()], rows)


def areas(file: Content) -> str:
    """Area under each method's frontier, and what OS-Pruner has more, or thinks less."""
    frame = Results.from_dict(file).frontiers
    first = "OS-Pruner" if frame["method"][0] in OURS else frame["method"][0]
    lead = Column(f"area of {first} minus this one, points", "lead", 100, 1, signed=True)
    columns = [Column("area, %", "area", 100, 1), lead]
    if "fewer" in frame:
        columns.append(Column("tokens above it, %", "fewer", 100, 1, signed=True))
    return Table.of(frame, columns, frame["method"].tolist(), corner="").markdown()


def gaps(file: Content) -> str:
    """The share of the gap in reward that each method closes, by price."""
    frame = Results.from_dict(file).frontiers
    columns = [
        Column(f"price={price_name(price)}", name, 100, 1)
        for price, name in prices_of(frame, "gap").items()
    ]
    methods = frame["method"].tolist()
    return Table.of(frame, columns, methods, corner="% of the gap closed").markdown()


def spread(file: Content) -> str:
    """How far training seeds lie apart, by price."""
    results = Results.from_dict(file)
    rows = [
        [
            name.removeprefix("price"),
            *(f"{found[key]:.{n}f}" if key in found else "" for key, (_, n) in SPREAD.items()),
        ]
        for name, found in results.about["seed_spread"].items()
    ]
    return markdown_table(["price", *(head for head, _ in SPREAD.values())], rows)


def readme(file: Content, trivial: Content | None = None) -> str:
    """What validation chose of each kind of method, our other prices, trivial rules and the oracle.

    Of a file without a choice: one policy at several prices, and the best classifier by AES; the
    limits are then those of `trivial`, a comparison of rules on the same labels.
    """
    results = Results.from_dict(file)
    rules, limits = results.rules, results.limits
    chosen = rules[rules["chosen"].astype(bool)]
    if "validation_aes" not in rules:
        tried = rules[rules["method"].isin(CLASSIFIERS)]
        classifier = tried.loc[[tried["aes"].fillna(-math.inf).idxmax()]]
        limits = limits if trivial is None else Results.from_dict(trivial).limits
        parts = [rules[:1], next_to_prices(results), classifier, limits]
        return _first_table(parts, {2: "best classifier: "})
    classifiers = chosen["method"].isin(CLASSIFIERS)
    free = ~classifiers & ~chosen["method"].isin(OURS) & (chosen["method"] != "loops")
    best = [chosen[one].nlargest(1, "validation_aes") for one in (classifiers, free)]
    ours = chosen[chosen["method"].isin(OURS)]
    ours = rules.loc[ours.index.union(next_to_prices(results).index)]
    loops = chosen[chosen["method"] == "loops"]
    prompts = rules[rules["method"].str.startswith(f"{FULL}, ")]
    parts = [rules[:1], prompts, ours, *best, loops, limits]
    table = _first_table(parts, {3: "best classifier: ", 4: "best rule: "})
    return f"{table}\n{rival(results)}"


def _first_table(parts: Sequence[pd.DataFrame], heads: Mapping[int, str]) -> str:
    """Rows of results, with compute where it was counted; `heads` stand before a part's names."""
    found = pd.concat(parts)
    labels = [
        heads.get(n, "") + named(one, chosen=one["method"] in OURS and one["chosen"] is True)
        for n, part in enumerate(parts)
        for _, one in part.iterrows()
    ]
    counted = found.get("flops_ratio", pd.Series(dtype=float)).notna().any()
    columns = (*MAIN[:3], *([Column("compute, %", "flops_ratio", 100)] if counted else ()))
    return Table.of(found, columns, labels, corner="").markdown()


def rival(results: Results) -> str:
    """The best rival, by its area on validation, beside our policy: a sentence."""
    frame = results.frontiers
    others = frame[~frame["method"].isin((*OURS, ORACLE))]
    others = others[~others["method"].str.startswith("fixed ")]
    best = others.loc[others["validation_area"].idxmax()]
    fewer, lead = (Estimate.of(best, name) for name in ("fewer", "lead"))
    return (
        f"Each setting is the one of the highest AES on validation problems. The rival of the "
        f"largest area there is {best['method']}: for the accuracy of our chosen price it thinks "
        f"{fewer.text(100, 1, signed=True)} % of a full trace more, and its area is "
        f"{lead.text(100, 1, signed=True)} points smaller. Brackets are 95 % intervals by problem "
        "and training seed, and hold the choice.\n"
    )


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
                f"{100 * stats['capped_traces'] / stats['traces']:.1f}",
            ]
        )
    heads = ["", "problems", "right at the end, %", "thinking tokens (80 % of the traces)"]
    heads += ["steps", "first right after (80 %)", "right at a step, wrong at the end, %"]
    heads += ["cut at the cap, %"]
    return markdown_table(heads, rows)


def real_growth(file: Content) -> str:
    """How right the answers are that are forced after a share of the real model's trace."""
    rows = []
    for name, stats in file["problems"].items():
        right = dict(zip(stats["fractions"], stats["accuracy_by_fraction"], strict=True))
        rows.append([REAL_SETS[name], *(f"{100 * right[share]:.1f}" for share in SHARES)])
    return markdown_table(["right, %, after", *(f"{100 * s:.0f} %" for s in SHARES)], rows)


def promises(file: Content) -> str:
    """What validation could promise of a policy, and whether the test problems kept it."""
    rows = []
    for most, one in file.items():
        row = [f"{100 * float(most):g}", "none", "it loses too much", ""]
        if one["value"] is not None:
            row[1] = f"price {price_name(one['value'])}"
            row[2] = f"{100 * one['loss']:.1f} points lost, {one['problems']:,} problems"
            row[3] = (
                f"{100 * one['test_loss']:.1f} points lost, {100 * one['test_saved']:.1f} % saved"
            )
        elif one["enough"]:
            row[2] = f"about {one['enough']:,} problems would do"
        rows.append(row)
    heads = ["points that may be lost", "promise", "on validation", "on the test problems"]
    return markdown_table(heads, rows)


def choices(file: Content) -> str:
    """What choices of a price save, and how often they break their word, by problems."""
    frame = pd.DataFrame(file["rows"])
    frame["told"] = [f"{100 * s:.0f} ({100 * b:.0f})" for s, b in frame[["saved", "broken"]].values]
    frame["case"] = [
        f"{100 * most:g} pt, {n:,.0f}"
        for most, n in frame[["max_loss", "problems"]].values.tolist()
    ]
    table = frame.pivot(index="choice", columns="case", values="told")
    table = table.loc[frame["choice"].unique(), frame["case"].unique()]
    rows = [[str(name), *row] for name, row in zip(table.index, table.values.tolist(), strict=True)]
    return markdown_table(["saved % (word broken %)", *table.columns], rows)


def drift(file: Content) -> str:
    """How soon a server sees that its traffic has drifted, by the size of its control group."""
    shares = {key: one for key, one in file.items() if key.startswith("control ")}
    heads = list(next(iter(shares.values())))
    rows = [[name, *(one[head] for head in heads)] for name, one in shares.items()]
    return markdown_table(["share of requests", *heads], rows)


def above_full(file: Content) -> str:
    """What is right more often than the full trace, and what of it is chance."""
    rows = [
        [
            name,
            f"{one['gain']:+.1f} [{one['low']:+.1f}, {one['high']:+.1f}]",
            *(f"{one[key]:.1f}" for key in ("better", "worse", "by_chance")),
        ]
        for name, one in file["rules"].items()
    ]
    heads = ["", "accuracy less the full trace's, points", "mended", "spoilt", "by chance"]
    return markdown_table(heads, rows)


def tails(file: Content) -> str:
    """What small policies store and earn, beside whole copies."""
    rows = [
        [
            form,
            f"{one['stored_bytes'] / 1e6:.2f}",
            f"{one['rate']:g}",
            f"{one['reward']:.1f}",
            f"{one['ahead']:+.1f} [{one['ahead_low']:+.1f}, {one['ahead_high']:+.1f}]",
        ]
        for form, one in file["forms"].items()
    ]
    heads = ["", "MB", "rate, x default", "reward, points", "less the copies'"]
    return markdown_table(heads, rows)


def claims(file: Content) -> str:
    """For how many seeds each of the demo's claims held."""
    seeds = {seed: pd.DataFrame(told).set_index("claim") for seed, told in file["seeds"].items()}
    held = pd.DataFrame({seed: told["holds"] for seed, told in seeds.items()})
    rows = [[str(name), f"{one.sum()} of {one.count()}"] for name, one in held.iterrows()]
    rows.append(["all of them", f"{held.all().sum()} of {len(seeds)}"])
    return markdown_table(["claim", "seeds"], rows)


TABLES: dict[str, Callable[..., str]] = {
    "claims": claims,
    "drift": drift,
    "choices": choices,
    "promises": promises,
    "tails": tails,
    "above-full": above_full,
    "at-prices": at_prices,
    "at-chosen": at_chosen,
    "areas": areas,
    "gaps": gaps,
    "spread": spread,
    "readme": readme,
    "real-labels": real_labels,
    "real-growth": real_growth,
    "online": online,
    "served": served,
    "speed": speed,
    "latency": latency,
    "after-cut": after_cut,
    "bases": bases,
}


def content_of(name: str, folder: Path = DOCS) -> Content:
    """What a file holds, or what stands in it under "FILE:KEY.KEY"."""
    file, _, keys = name.partition(":")
    content: Content = json.loads((folder / file).read_text("utf-8"))
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
