"""Evaluation of stopping rules: a labelled trace, its exact expected reward, replay and reports.

One concept, one module; nothing is imported here, so that `ospruner.eval.grading` needs no torch:

    schema       one labelled trace a row, and the settings of a label run
    table        the same traces as padded arrays
    benchmarks   problems with reference answers, and the user message that asks one
    grading      boxed answers, compared by Math-Verify under a time limit
    stopping     survival, stopping distribution and expected reward (torch, differentiable)
    replay       expected accuracy and length of a rule on labelled traces
    metrics      reduction, AES, intervals by problem, paired differences
    results      outcomes summarised: every number with its interval
    selection    choosing an operating point on validation
    limits       what no rule can beat, and exactly solved stopping problems
    report       the results table, the Pareto picture and the results file
"""
