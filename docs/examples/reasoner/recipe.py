"""The recipe of the embedded reasoner: `python docs/examples/reasoner/recipe.py OUT`.

A Qwen2 of 1.3 M parameters, trained from scratch: Muon on the matrices, AdamW on the rest, chains
that grow longer (curriculum), and two cycles of the learning rate, each ending in a linear decay:
the first teaches arithmetic and checking, the second the habits of the shipped reasoner.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from examples import batches_by_length, build_example, draw_examples, draw_training_problem
from fallible_reasoner import FIRST_CYCLE, SECOND_CYCLE
from rich.console import Console
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ospruner.progress import PhaseBars, Progress

VOCABULARY_SIZE = 640
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pre-tokenizer: a full stop and the blank line after it stay together."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""Like R1-Distill's: the generation prompt already opens the thinking."""


def bpe_tokenizer(
    texts: Iterable[str], vocabulary_size: int, special_tokens: Sequence[str], min_frequency: int
) -> Tokenizer:
    """A byte-level BPE of texts, which splits as Qwen2's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=min_frequency,
        special_tokens=[AddedToken(token, normalized=False) for token in special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A tokenizer of rendered examples, in which a digit is always one token."""
    rng = Random(f"tokenizer/{seed}")
    pieces = (
        build_example(draw_training_problem(rng, 7, True), rng, FIRST_CYCLE) for _ in range(5000)
    )
    texts = ("".join(text for text, _ in example) for example in pieces)
    tokenizer = bpe_tokenizer(texts, VOCABULARY_SIZE, SPECIAL_TOKENS, min_frequency=0)
    # As in R1-Distill, the thinking markers are no special tokens: decoding keeps them.
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        chat_template=CHAT_TEMPLATE,
    )


CHUNK_EXAMPLES = 4096
"""Examples drawn at a time and sorted by length."""


@dataclass(frozen=True)
class Recipe:
    """Settings of one training run of the reasoner."""

    tokens: int = 30_000_000  # seen in the first cycle, prompts and padding included
    second_tokens: int = 7_000_000  # in the second one
    second_peak: float = 0.3  # learning rates at its start, as a share of the peaks
    batch_tokens: int = 12_288  # in a batch, padding included
    muon_learning_rate: float = 0.02  # peak, of the weight matrices
    adam_learning_rate: float = 4e-3  # peak, of embeddings and norms
    warmup: float = 0.01  # share of the first cycle in which the learning rates rise
    decay: float = 0.4  # share of it in which they fall, at its end
    seed: int = 0  # of the weights, the problems and the traces


def reasoner_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    """Architecture of the embedded reasoner."""
    return Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _float32_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention in float32: on a CPU the bfloat16 kernel costs 1.4 times the whole step."""
    groups = query.shape[1] // key.shape[1]
    with torch.autocast(query.device.type, enabled=False):
        output = F.scaled_dot_product_attention(
            query.float(),  # (B, heads, S, D)
            key.float().repeat_interleave(groups, dim=1),
            value.float().repeat_interleave(groups, dim=1),
            is_causal=True,
            scale=scaling,
        )
    return output.transpose(1, 2).contiguous().to(query.dtype), None


AttentionInterface.register("float32_sdpa", _float32_attention)


def curriculum(progress: float) -> tuple[int, bool]:
    """Longest chain and whether hopeless products are drawn, at `progress` in [0, 1]."""
    return min(7, 2 + int(progress * 40)), progress >= 0.08


def learning_rate_factor(seen: int, recipe: Recipe, second: bool) -> float:
    """Factor on both learning rates after `seen` tokens of the cycle: rise, stay, fall to 2 %."""
    if second:
        return recipe.second_peak * max(0.02, 1.0 - seen / recipe.second_tokens)
    progress = min(1.0, seen / recipe.tokens)
    rise = min(1.0, progress / recipe.warmup)
    fall = min(1.0, (1.0 - progress) / recipe.decay)
    return max(0.02, min(rise, fall))


def build_optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, norms and biases."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=recipe.muon_learning_rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(
            others, lr=recipe.adam_learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        ),
    ]


def take_step(
    model: nn.Module,
    loss: torch.Tensor,
    optimizers: Sequence[torch.optim.Optimizer],
    recipe: Recipe,
    factor: float,
) -> None:
    """One step of the optimisers of `build_optimizers`, at a factor on their peak rates."""
    peaks = recipe.muon_learning_rate, recipe.adam_learning_rate
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, peak in zip(optimizers, peaks, strict=True):
        optimizer.param_groups[0]["lr"] = peak * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def example_loss(model: Qwen2ForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean cross-entropy of the next token.

    `ids` (B, S) are right-padded (causal attention needs no mask then); `weights` (B, S) of each
    token as a target.
    """
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # (B, S, H)
        logits = model.lm_head(hidden[:, :-1])  # (B, S-1, V)
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )  # (B*(S-1),)
    counted = weights[:, 1:].flatten()
    return (losses * counted).sum() / counted.sum()


def train_reasoner(out_dir: Path, recipe: Recipe, progress: Progress) -> None:
    """Train the reasoner on the CPU and save it in `out_dir/reasoner`.

    Args:
        out_dir: Folder of the run.
        recipe: Settings.
        progress: Called with phase "tokens" after each step.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(recipe.seed)
    tokenizer = build_tokenizer(recipe.seed)
    model = Qwen2ForCausalLM(reasoner_config(tokenizer))
    model.set_attn_implementation("float32_sdpa")
    optimizers = build_optimizers(model, recipe)
    seen = chunk = 0
    total = recipe.tokens + recipe.second_tokens
    while seen < total:
        second = seen >= recipe.tokens
        max_steps, with_product = curriculum(1.0 if second else seen / recipe.tokens)
        name = f"{recipe.seed}/{chunk}"
        habits = SECOND_CYCLE if second else FIRST_CYCLE
        examples = draw_examples(tokenizer, CHUNK_EXAMPLES, name, max_steps, with_product, habits)
        for ids, weights in batches_by_length(examples, recipe.batch_tokens, Random(name)):
            in_cycle = seen - recipe.tokens if second else seen
            factor = learning_rate_factor(in_cycle, recipe, second)
            loss = example_loss(model, torch.from_numpy(ids), torch.from_numpy(weights))
            take_step(model, loss, optimizers, recipe, factor)
            seen += ids.size
            progress("tokens", min(seen, total), total, f"loss {loss.item():.3f}")
        chunk += 1
    save_reasoner(model, tokenizer, out_dir / "reasoner")


def save_reasoner(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Save the reasoner in bfloat16 with its tokenizer and sampling defaults."""
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.6,
        top_p=0.95,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.bfloat16()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Trains the reasoner anew, for hours on a CPU."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", type=Path, help="Folder of the run.")
    out = parser.parse_args().out
    with PhaseBars(Console(), "reasoner") as bars:
        train_reasoner(out, Recipe(), bars)
    print(f"The reasoner: {out / 'reasoner'}")


if __name__ == "__main__":
    main()
