"""Evaluation of stopping rules: labelled traces, their exact expected reward, replay, reports.

schema      one labelled trace a row, and the settings of a label run
table       the same traces as padded arrays
replay      expected accuracy and length of policies, fixed rules and hindsight on labelled traces
measured    what policies and rules say at every step of labelled traces
learnstop   a classifier of scalars, fitted here
recorded    the same of a whole comparison, and its file
methods     policies by name, and how they decide
compare     one comparison of all of these
online      the same methods by generating
compute     what models and rules compute, in floating-point operations
metrics     reduction, AES, choosing an operating point
evaluation  rules with intervals by problem and training seed, which make each choice again
frontiers   areas under whole methods, and the oracle's gap
calibration promises about accuracy
results     every number with its interval: the frame, the file, and text

problems/   where problems come from and how they are asked
grading/    boxed answers, compared by Math-Verify under a time limit
report/     tables, pictures, one page in Markdown, the paper's numbers
harness/    policies as models of lm-evaluation-harness
"""
