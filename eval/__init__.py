"""Evaluation of stopping rules: labelled traces, their exact expected reward, replay, reports.

schema     one labelled trace a row, and the settings of a label run
table      the same traces as padded arrays
stopping   survival, stopping distribution, expected reward (torch, differentiable)
replay     expected accuracy and length of a rule on labelled traces
methods    which policies are evaluated and how they decide
compute    what a rule computes, in floating-point operations
metrics    reduction, AES, intervals by problem, paired differences
limits     what no rule can beat, and exactly solved stopping problems
selection  choosing an operating point on validation
results    outcomes summarised: every number with its interval

problems/  where problems come from and how they are asked
grading/   boxed answers, compared by Math-Verify under a time limit
rules/     rules by name, such as "budget:200", and their replay
frontier/  areas under frontiers, shares of the oracle's gap, the best rule without hindsight
online/    the same rules by generating
report/    terminal, tables, pictures, one HTML page, the paper's numbers
"""
