"""Evaluation of stopping rules: a labelled trace, its exact expected reward, replay and reports.

One concept, one module; nothing is imported here, so that `ospruner.eval.grading` needs no torch:

    schema           one labelled trace a row, and the settings of a label run
    table            the same traces as padded arrays
    benchmarks       problems with reference answers, and the user message that asks one
    problem_sources  where problems come from: benchmarks by name, files, the Hub
    task             problems with their prompt, answer reading and grader; another domain is one
    grading          boxed answers, compared by Math-Verify under a time limit
    stopping         survival, stopping distribution and expected reward (torch, differentiable)
    replay           expected accuracy and length of a rule on labelled traces
    rules, policies  what is evaluated, by name
    online           the same by generating; online_runners: with the hook, or any engine
    metrics          reduction, AES, intervals by problem, paired differences
    results          outcomes summarised: every number with its interval
    evaluation       rules on the traces of one model and benchmark, kept in a folder
    selection        choosing an operating point on validation
    limits           what no rule can beat, and exactly solved stopping problems
    frontier         the area under a method's frontier, the share of the oracle's gap it closes
    summary, report  an evaluation in the terminal and as a file
    picture, panels  Pareto fronts, training dynamics, accuracy by difficulty
    paper            the paper's numbers; paper_tables: its tables from ours, as grid_tables
    html_report      one page of a folder of evaluations; viewer: traces step by step
    hub_results      results as the Hub's card metadata
"""
