"""Computes anew what README and these pages print, and names what differs: `make check-numbers`.

Tables and pictures are compared with the JSON files that they are made from, and of these each
comparison with what its file of signals gives: `signals/FILE.KEY.KEY.parquet` is what
`ospruner compare` wrote beside the results that stand in `FILE.json` under KEY.KEY. No model runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pictures import FOLDER, PICTURES
from tables import DOCS, PAGES, content_of, filled

from ospruner.eval.compare import report_of
from ospruner.eval.recorded import Recorded
from ospruner.eval.results import FIRST

ROWS = {"frame": ("method", "parameter"), "differences": ("other",), "frontiers": ("method",)}
"""By which columns a row of each frame is found again."""


def pages() -> Iterator[str]:
    """Tables and pictures that are not what their files give."""
    for page in PAGES:
        if filled(text := page.read_text("utf-8")) != text:
            yield f"{page.name}: its tables are not what `make docs` writes"
    for name, picture in PICTURES.items():
        if picture.digest not in (FOLDER / f"{name}.svg").read_text("utf-8"):
            yield f"{name}.svg: not what `make docs` draws"


def signals(folder: Path) -> Iterator[str]:
    """Numbers in the JSON files that are not what the files of signals give."""
    for path in sorted(folder.glob("signals/*.parquet")):
        file, *keys = path.stem.split(".")
        stored = content_of(f"{file}.json:{'.'.join(keys)}", folder)
        found = report_of(Recorded.read(path)).results.to_dict()
        for name in FIRST:
            for row in stored[name]:
                yield from (f"{path.name}, {name}: {one}" for one in unlike(row, found[name], name))


def unlike(row: dict[str, Any], found: list[dict[str, Any]], name: str) -> Iterator[str]:
    """What a stored row holds that the computed one does not."""
    key = {column: row[column] for column in ROWS[name]}
    same = [one for one in found if all(_alike(one[column], x) for column, x in key.items())]
    if len(same) != 1:
        yield f"{len(same)} rows of {key}"
        return
    for column, value in row.items():
        if not _alike(value, computed := same[0].get(column)):
            yield f"{column} of {key} is {value!r}, computed {computed!r}"


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    return bool(one == other)


def main() -> None:
    """Prints what differs, and ends with an error where something does."""
    wrong = [*pages(), *signals(DOCS)]
    print("\n".join(wrong) or "every number is what its files give")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
