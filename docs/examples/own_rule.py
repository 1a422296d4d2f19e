"""A stop rule of one's own: stop where two answers in a row are equal and sure.

ospruner compare LABELS docs/examples/own_rule.py:SURE_TWICE:0.9 --out runs/compared
"""

import math

from ospruner.rules import Family


def sure_twice(ends, same, max_tokens=32):
    """The lower confidence of the last two trial answers, if they are equal; else NaN."""
    before = None
    for end in ends:  # the step ends of one trace, in order
        answer = end.trial_answer(max_tokens)
        agree = before is not None and answer.said != "" and same(before.said, answer.said)
        yield min(before.confidence, answer.confidence) if agree else math.nan
        before = answer


ASKS = frozenset({"trial_answer", "text"})
SURE_TWICE = Family("sure-twice", sure_twice, "sure twice", asks=ASKS, reads="forced_logprob")
