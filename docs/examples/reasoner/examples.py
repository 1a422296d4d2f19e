"""Training examples of the toy reasoner: token ids and the weight of each token in the loss."""

from random import Random
from typing import NamedTuple

import numpy as np
from fallible_reasoner import Habits, write_trace
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from ospruner.demo.problems import ToyProblem, draw_problem
from ospruner.eval.problems.problem import user_message
from ospruner.formats import DEEPSEEK_R1

CUT_SHARE = 0.45
"""Share of examples cut at a random paragraph and followed by the forced answer."""

ANSWER_WEIGHT = 3.0
"""Weight of an answer token in the loss; a thinking token weighs one."""

PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n"
"""What the reasoner's chat template makes of a message."""


class Example(NamedTuple):
    """A tokenised example: ids (S,), prompt first, and the weight of each as a target (S,).

    The prompt and everything that is forced after a cut weigh nothing.
    """

    ids: NDArray[np.int16]
    weights: NDArray[np.float32]


def draw_training_problem(rng: Random, max_steps: int, with_product: bool) -> ToyProblem:
    """Draw a problem of the `reasoner` split: never one that a policy is trained or tested on."""
    while True:
        problem = draw_problem(rng, max_steps, with_product)
        if problem.split == "reasoner":
            return problem


def build_example(problem: ToyProblem, rng: Random, habits: Habits) -> list[tuple[str, float]]:
    """Write one example as (text, loss weight) pieces.

    The answer after a cut is the one that the reasoner holds there, exactly as at the natural
    end; where it holds none yet (no attempt finished) it is the right one, to be guessed.
    """
    prompt = PROMPT.format(user_message(problem.as_problem(), DEEPSEEK_R1))
    trace = write_trace(problem, rng, habits)
    cut = None
    if rng.random() < CUT_SHARE:
        cut = rng.randint(0, len(trace.paragraphs)) if rng.random() < 0.95 else 0
    belief = None if cut == 0 else trace.beliefs[-1 if cut is None else cut - 1]
    answer = problem.answer if belief is None else belief
    if cut is not None:
        thinking = "".join(f"{text}\n\n" for text in trace.paragraphs[:cut])
        forced = DEEPSEEK_R1.closing + DEEPSEEK_R1.box_prefix
        end = (f"{answer}}}<|im_end|>", ANSWER_WEIGHT)
        return [(prompt, 0.0), (thinking, 1.0), (forced, 0.0), end]
    thinking = "\n\n".join(trace.paragraphs) + "\n"
    opening = rng.choice(("", "", "The answer is "))
    tail = "}." if opening else "}"
    return [
        (prompt, 0.0),
        (thinking, 1.0),
        (f"{DEEPSEEK_R1.think_end}\n\n{opening}", 1.0),
        (DEEPSEEK_R1.box_prefix, 1.0),
        (f"{answer}{tail}<|im_end|>", ANSWER_WEIGHT),
    ]


def encode(tokenizer: PreTrainedTokenizerFast, pieces: list[tuple[str, float]]) -> Example:
    """Tokenise the pieces one by one (forced text meets the model as separate ids too)."""
    ids: list[int] = []
    weights: list[float] = []
    for text, weight in pieces:
        piece = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        weights += [weight] * len(piece)
    return Example(np.array(ids, np.int16), np.array(weights, np.float32))


def draw_examples(
    tokenizer: PreTrainedTokenizerFast,
    count: int,
    seed: str,
    max_steps: int,
    with_product: bool,
    habits: Habits,
) -> list[Example]:
    """Draw `count` examples in an order fixed by `seed`."""
    rng = Random(seed)
    examples = []
    for _ in range(count):
        problem = draw_training_problem(rng, max_steps, with_product)
        examples.append(encode(tokenizer, build_example(problem, rng, habits)))
    return examples


def batches_by_length(
    examples: list[Example], batch_tokens: int, rng: Random
) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Group examples of similar length into right-padded batches of about `batch_tokens`.

    Lengths are rounded up to multiples of 32 and the rows follow from the length: few different
    shapes, for each of which a CPU compiles its matrix kernels once.

    Returns:
        Batches in random order: ids (B, S) padded with 0 and weights (B, S) padded with 0.
    """
    ordered = sorted(examples, key=lambda e: len(e.ids))
    batches = []
    while ordered:
        longest = -(-len(ordered[-1].ids) // 32) * 32
        count = max(1, batch_tokens // longest)
        rows = [ordered.pop() for _ in range(min(len(ordered), count))]
        ids = np.zeros((count, longest), np.int64)
        weights = np.zeros((count, longest), np.float32)
        for index, row in enumerate(rows):
            ids[index, : len(row.ids)] = row.ids
            weights[index, : len(row.ids)] = row.weights
        batches.append((ids, weights))
    rng.shuffle(batches)
    return batches
