"""Theorem 1 in numbers: how much any threshold on correctness can lose, against the optimum.

    python docs/examples/theorem1.py theorem1.png

The family of the proof (appendix A): two prefixes look alike (both right with probability epsilon),
yet one token more makes the first one right, and many tokens leave the second one wrong. Solved
exactly by `optimal_stopping.solve`; no threshold tells the two apart.
"""

import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from optimal_stopping import best_threshold, solve, theorem1_problem

from ospruner.eval.report.pictures import FAINT, INK, MUTED, STYLES, furnish

GAPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
PENALTIES = (0.1, 0.5, 0.9)


def ratios(price: float) -> list[float]:
    """Optimal value over the best threshold's, for each K of GAPS."""
    found = []
    for gap in GAPS:
        problem = theorem1_problem(price, gap)
        optimum = solve(problem, price)[0]
        _, threshold = best_threshold(problem, price)
        found.append(optimum / threshold)
    return found


def main(path: Path) -> None:
    """Prints the ratios and draws them."""
    figure = Figure(figsize=(5.6, 4.2), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(GAPS, GAPS, ls=(0, (4, 3)), color=MUTED, lw=1, label="K: what the theorem promises")
    for price, (colour, marker) in zip(PENALTIES, STYLES, strict=False):
        found = ratios(price)
        print(f"λ={price}:", ", ".join(f"{ratio:.1f}" for ratio in found))
        axes.plot(GAPS, found, marker=marker, color=colour, lw=1.2, ms=5, label=f"λ={price}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    furnish(axes, "K asked for", "optimal value / best threshold's value")
    axes.grid(axis="x", color=FAINT, lw=0.6)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    figure.savefig(path)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "theorem1.png"))
