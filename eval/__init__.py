"""Evaluation of stopping rules: labelled traces, their exact expected reward, replay, reports.

schema      one labelled trace a row, and the settings of a label run
table       the same traces as padded arrays
replay      expected accuracy and length of a policy on labelled traces
measured    rules without training on labelled traces
learnstop   a classifier of scalars, fitted here
recorded    what methods say at every step, and its file
methods     policies by name, and how they decide
compare     one comparison of all of these
online      the same methods by generating
compute     what models and rules compute, in floating-point operations
metrics     reduction, AES, choosing an operating point
intervals   intervals by problem and training seed, which make each choice again
frontiers   areas under whole methods, and the oracle's gap
limits      what no rule can beat, and fixed rules
calibration promises about accuracy
results     every number with its interval: the frame, and the file
text        numbers and tables as text

problems/   where problems come from and how they are asked
grading/    boxed answers, compared by Math-Verify under a time limit
report/     terminal, tables, pictures, one HTML page, the paper's numbers
harness/    policies as models of lm-evaluation-harness
"""
