"""`generate` with a stop policy: any base's, hooked in one place.

The hook is a logits processor with a stopping criterion: the decision after a step's last token and
the first forced token fall into the same decode step. Until its stop, every row is what plain
generate would have written. What would go wrong in silence is refused before anything runs.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode

from .configuration_ospruner import check_length, max_positions
from .formats_ospruner import TokenFormat
from .policy_ospruner import LayerKeys, Reader, StoppingPolicy, price_places
from .stopping_ospruner import (
    Phase,
    RowPlan,
    Said,
    StopPolicyConfig,
    StopRecord,
    StopRow,
    shape_scores,
)

_KEYS = {one.name for one in fields(StopPolicyConfig)}
OnStep = Callable[[int, StopRecord], object]
HINT = "or pass stop_policy=False"

# Arguments of generate, and why they cannot be combined with a stop policy.
_ARGUMENTS = {
    "custom_generate": "it replaces the decoding that the policy works in",
    "inputs_embeds": "steps are found in token ids: pass input_ids alone",
    "position_ids": "the policy derives them from the attention mask: pass input_ids alone",
}
# Such of the generation config: what they forbid changes with the text.
_SETTINGS = {
    "no_repeat_ngram_size": "what closes the thinking may stand in it already: leave it out",
    "encoder_no_repeat_ngram_size": "the prompt may hold what closes the thinking: leave it out",
    "forced_eos_token_id": "another token may be forced at max_length: leave it out",
}
# What may forbid tokens all along, beside logits processors.
_CONSTRAINTS = (
    *("prefix_allowed_tokens_fn", "bad_words_ids", "sequence_bias", "suppress_tokens"),
    *("begin_suppress_tokens", "forced_bos_token_id"),
)


def refuse_unsupported(
    base: Any, prompt: Any, config: GenerationConfig, arguments: Mapping[str, Any]
) -> None:
    """Refuses what does not go together with a stop policy, naming it and what to do."""
    compiled = any(
        module._compiled_call_impl is not None
        or "_torchdynamo_orig_callable" in vars(module.forward)
        or "_orig_mod" in module._modules
        for module in base.modules()
    )
    training = base.training and base.is_gradient_checkpointing
    encodes = base.config.is_encoder_decoder
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    other = mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    paged = "paged" in (config.cache_implementation, arguments.get("cache_implementation"))
    twice = config.guidance_scale not in (None, 1) or config.token_healing
    cache = arguments.get("past_key_values")
    beams = config.length_penalty not in (None, 1) or "length_penalty" in arguments
    astray = sorted(_KEYS.intersection(arguments))
    excluded = [name for name in _ARGUMENTS if arguments.get(name) is not None]
    for name in _SETTINGS:
        off = (None,) if name.endswith("_id") else (None, 0)
        excluded += [] if vars(config).get(name) in off else [name]
    refused = {
        "the base is compiled by torch.compile, which skips hooks placed later in silence: "
        f"stop_policy needs it as it was loaded, {HINT}": compiled,
        "the base is in train mode with gradient checkpointing, where transformers leaves the "
        f"cache out in silence: call base.eval() first, {HINT}": training,
        f"{type(base).__name__} is an encoder-decoder: stop_policy needs a decoder": encodes,
        f"stop_policy works with greedy decoding and sampling, not with {mode.value}: leave out "
        f"num_beams, assistant_model, prompt_lookup_num_tokens and the like, {HINT}": other,
        "use_cache is False; stop_policy needs the cache: leave it out": config.use_cache is False,
        f"stop_policy cannot work in continuous batching ('paged'), {HINT}": paged,
        f"guidance_scale and token_healing run the base a second time, {HINT}": twice,
        **{
            f"{name} and stop_policy exclude each other; {(_ARGUMENTS | _SETTINGS)[name]}": True
            for name in excluded
        },
        "past_key_values holds tokens that the stopping policy has not seen; pass the whole text "
        "as input_ids without them": cache is not None and cache.get_seq_length() > 0,
        "length_penalty is for beams, which stop_policy does not take; the price of a token is "
        "stop_policy={'price': ...}": beams,
        f"{astray} are settings of stop_policy: pass stop_policy={{...}} with them": astray,
        "the generation config has no eos_token_id: rows cannot end": config.eos_token_id is None,
    }
    _refuse(refused)
    refuse_prompts(prompt, arguments.get("attention_mask"), base.config)


def refuse_prompts(prompt: Any, mask: Any, base_config: PreTrainedConfig) -> None:
    """Refuses prompts that a base of this configuration cannot read, by row."""
    vocabulary, limit = base_config.get_text_config().vocab_size, max_positions(base_config)
    if not isinstance(prompt, Tensor) or prompt.dtype not in (torch.int64, torch.int32):
        kind = prompt.dtype if isinstance(prompt, Tensor) else type(prompt).__name__
        raise TypeError(f"the prompt is {kind}; it must be a tensor of token ids (B, S)")
    if prompt.dim() != 2 or prompt.numel() == 0:
        raise ValueError(f"input_ids has the shape {tuple(prompt.shape)}; it must be (B, S)")
    mask = torch.ones_like(prompt) if mask is None else mask
    if not isinstance(mask, Tensor) or mask.shape != prompt.shape:
        raise ValueError("attention_mask must be a tensor of the shape of input_ids")
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError("attention_mask must hold 1 for tokens and 0 for padding, nothing else")
    outside, lengths = prompt[(prompt < 0) | (prompt >= vocabulary)][:5].tolist(), mask.sum(-1)
    empty = (lengths == 0).nonzero().flatten().tolist()
    holes = (mask[:, 1:] < mask[:, :-1]).any(-1).nonzero().flatten().tolist()
    longest = int(lengths.max())
    _refuse(
        {
            f"input_ids holds {outside}; the base's vocabulary has the ids 0 to {vocabulary - 1}: "
            "use its own tokenizer": outside,
            f"the prompts of rows {empty} are empty: their attention_mask is all 0": empty,
            f"the attention_mask of rows {holes} has zeros after tokens; padding must stand on the "
            "left: set tokenizer.padding_side = 'left'": holes,
            f"the prompt of row {int(lengths.argmax())} has {longest} tokens; the base has {limit} "
            "positions (max_position_embeddings): shorten the prompt, or take a base with a longer "
            "context": limit is not None and longest > limit,
        }
    )


def _refuse(wrong: Mapping[str, object]) -> None:
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(message)


class Asked(Reader):
    """A context in which a running generate can ask the policy about rows.

    A policy that is queries only is asked about all of them at once, with what the last forward
    left. Any other runs on all that is new in a row since it was last asked, and extends the row's
    own cache, so that a row costs what it costs alone.
    """

    def __init__(self, base: PreTrainedModel, policy: StoppingPolicy, price: float | None) -> None:
        super().__init__(base, policy)
        self._price, self._dropped = price, 0  # columns before the first chunk
        self._rows: dict[int, tuple[Cache | None, int]] = {}  # cache, columns that it has seen

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._rows.clear()

    def keep(self, thinking: list[int], scores: Tensor) -> None:
        """After a forward: drops what no row that thinks may need later."""
        self._rows = {row: self._rows.get(row, (None, 0)) for row in thinking}
        needed = min((seen for _, seen in self._rows.values()), default=self.columns)
        while self.chunks and self._dropped + self.chunks[0].shape[1] <= needed:
            self._dropped += self.chunks.pop(0).shape[1]

    @torch.no_grad()
    def ask(self, rows: list[int], records: list[StopRecord], ids: Tensor) -> list[Said]:
        """What the policy says of rows."""
        policy, column = self._policy, self.columns - 1
        padding = (column - self.positions[:, 0]).tolist()
        padding = [padding[row % len(padding)] for row in rows]
        if policy.queries:
            outputs = self._of_queries(rows, column, padding)
        elif policy.tail is None:
            outputs = policy.outputs(self.hidden[rows, -1:])[:, 0]
        else:
            outputs = torch.cat([self._of_layers(*one) for one in zip(rows, padding, strict=True)])
        probabilities = torch.sigmoid(policy.logits(outputs, self._price)).tolist()
        if policy.prices is None:
            return [Said(one) for one in probabilities]
        prices = [policy.prices.price_at(place) for place in price_places(outputs).tolist()]
        return [Said(*one) for one in zip(probabilities, prices, strict=True)]

    def _of_queries(self, rows: list[int], column: int, padding: list[int]) -> Tensor:
        # Of a single row, and of all, nothing is copied.
        whole = len(rows) == len(self.hidden)
        chosen = slice(None) if whole else slice(rows[0], rows[0] + 1) if len(rows) == 1 else rows
        keys = [LayerKeys(one.keys[chosen], one.values[chosen], one.first) for one in self.keys]
        hidden = self.hidden[chosen, -1:]
        columns = torch.full((len(rows), 1), column, device=hidden.device)
        pads = torch.tensor(padding, device=hidden.device)[:, None]
        tokens = torch.arange(column + 1, device=hidden.device) >= pads if any(padding) else None
        return self._policy.outputs(hidden, columns - pads, tokens, None, keys, columns)[:, 0]

    def _of_layers(self, row: int, padding: int) -> Tensor:
        cache, seen = self._rows[row]
        if cache is None:
            cache, seen = self._policy.new_cache(), padding
        new = torch.cat([chunk[row] for chunk in self.chunks])[None, seen - self._dropped :]
        positions = torch.arange(seen - padding, self.columns - padding)[None]
        outputs = self._policy.outputs(new, positions, None, cache)
        self._rows[row] = (cache, self.columns)
        return outputs[:, -1]


class StopHook(LogitsProcessor):
    """Asks `asker` at step ends, decides, and forces what follows.

    `records` takes the rows' records with the first token, `constraints` names all that may have
    forbidden tokens before; `on_step` as of `generate_pruned`.
    """

    def __init__(
        self,
        plan: RowPlan,
        asker: Any,
        records: list[StopRecord],
        on_step: OnStep | None = None,
        constraints: Sequence[str] = (),
    ) -> None:
        self.rows: list[StopRow] = []
        self.records = records
        self._plan, self._asker, self._on_step, self._warned = plan, asker, on_step, False
        self._constraints = constraints

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """One decode step: decides where steps have ended, and shapes the scores (B, V)."""
        if not self.rows:
            first = self._plan.settings.first_sample_index
            prompts = enumerate(input_ids.tolist())
            self.rows = [StopRow(self._plan, ids, first + i) for i, ids in prompts]
            self.records += [row.record for row in self.rows]
            ends = set(self._plan.token_format.closing_ids)
            begun = [i for i, row in enumerate(self.rows) if row.phase is Phase.THINKING]
            self._check_allowed([(i, token) for i in begun for token in ends], scores)
        rows = [*enumerate(self.rows)]
        thinking = [i for i, row in rows if row.phase is Phase.THINKING]
        self._asker.keep([*thinking, *(i for i, row in rows if row.may_reopen)], scores)
        if thinking:
            self._decide([i for i in thinking if self.rows[i].at_boundary], input_ids)
        closing = [one for one in rows if one[1].phase in (Phase.FORCING, Phase.ANSWER)]
        if closing:
            forced = [(i, row.forced[0]) for i, row in closing if row.phase is Phase.FORCING]
            self._check_allowed(forced, scores)
            scores = scores.clone()  # the caller may keep the model's own
            shape_scores(scores, closing)
        return scores

    def _check_allowed(self, forced: list[tuple[int, int]], scores: Tensor) -> None:
        """Refuses to force tokens (of rows) that a constraint has forbidden."""
        if not self._constraints or not forced:
            return
        rows, ids = torch.tensor(forced, device=scores.device).unbind(1)
        forbidden = ids[scores[rows, ids] <= torch.finfo(scores.dtype).min].unique().tolist()
        if forbidden:
            raise ValueError(
                f"stop_policy must force the tokens {forbidden}, which close the thinking or begin "
                f"the answer, but {' or '.join(self._constraints)} forbids them: let it allow "
                "them, pass stop_policy={'answer': 'free'} where the answer alone is constrained "
                f"(then nothing but the end marker is forced), {HINT}"
            )

    def _decide(self, ended: list[int], input_ids: Tensor) -> None:
        """Decides for the rows that have ended a step: one question for all that ask."""
        asking = [i for i in ended if self.rows[i].asks]
        records = [self.rows[i].record for i in asking]
        answers = self._asker.ask(asking, records, input_ids) if asking else []
        said = dict(zip(asking, answers, strict=True))
        for i in ended:
            row = self.rows[i]
            row.decide(said.get(i, self._plan.unasked))
            if row.record.nan_steps and not self._warned:
                self._warned = True
                warnings.warn(
                    "the stopping policy gave NaN: rows continue. Its weights, or the base's "
                    "hidden states, are broken; StopRecord.nan_steps counts the steps",
                    stacklevel=2,
                )
            if self._on_step is not None and self._on_step(i, row.record) is True:
                row.answer_now()


class AnswerEnd(StoppingCriteria):
    """Hands each token to its row; ends complete rows, by `others`, and answers by `strings`."""

    def __init__(self, hook: StopHook, others: Any, strings: StopStringCriteria | None) -> None:
        self.hook, self.others, self.strings = hook, others, strings

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Which rows (B,) end with their last token."""
        ended = self.others(input_ids, scores, **kwargs)
        elsewhere, tokens = ended.tolist(), input_ids[:, -1].tolist()
        for i, row in enumerate(self.hook.rows):
            complete = row.push(tokens[i])
            if self.strings is not None and (told := row.stoppable_tokens):
                elsewhere[i] |= bool(self.strings(input_ids[i : i + 1, -told:], scores))
            if complete or elsewhere[i]:
                ended[i] = True
                row.end()
        return ended


def generate_pruned(
    base: Any,
    policy: StoppingPolicy | None,
    token_format: TokenFormat,
    settings: StopPolicyConfig,
    step_stride: int = 1,
    inputs: Tensor | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_step: OnStep | None = None,
    records: list[StopRecord] | None = None,
    **kwargs: Any,
) -> tuple[Any, list[StopRecord]]:
    """`base.generate` with the hook in it; several threads may do so on one base at once.

    Args:
        base: the causal LM that generates.
        policy: its policy; None with a rule, which takes its place.
        token_format: the base's way of thinking.
        settings: with a rule, or with the policy's defaults.
        step_stride: of the policy's configuration.
        inputs: prompt ids (B, S), left-padded; or pass `input_ids`.
        tokenizer: the base's, for `stop_strings`, `wind_down`, and rules that read texts.
        on_step: called with a row and its live record after each decision; True ends its thinking.
        records: an empty list to put the rows' live records in, for who reads them meanwhile.
        kwargs: generate's own arguments.

    Returns:
        What generate returns (an output object holds the records as `stop`, too), and the records.

    Raises:
        TypeError, ValueError: the decoding, the base or the prompt cannot be combined with it.
    """
    records = [] if records is None else records
    given = copy.deepcopy(kwargs.pop("generation_config", None))
    config = GenerationMixin._prepare_generation_config(base, given, **kwargs)[0]
    prompt: Any = kwargs.get("input_ids") if inputs is None else inputs
    refuse_unsupported(base, prompt, config, kwargs)
    eos_ids = frozenset(torch.as_tensor(config.eos_token_id).flatten().tolist())
    if both := sorted(eos_ids.intersection(token_format.forced_suffix())):
        raise ValueError(
            f"the tokens {both} close the thinking (format {token_format.format.name!r}) and are "
            "eos_token_id, too: take them out of base.generation_config.eos_token_id"
        )
    others = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
    strings = None
    if tokenizer is None:
        if (config.stop_strings, settings.wind_down) != (None, None):
            raise ValueError("stop_strings and wind_down need the base's tokenizer: tokenizer=...")
    elif config.stop_strings is not None:
        strings = StopStringCriteria(tokenizer, config.stop_strings)
        kwargs["stop_strings"] = None  # our own criterion takes its place
    if settings.wind_down is not None and tokenizer is not None:
        token_format = token_format.winding_down(settings.wind_down, tokenizer)
    # A hook added after compilation is skipped in silence.
    (kwargs if given is None else vars(given))["disable_compile"] = True
    processors = LogitsProcessorList(kwargs.pop("logits_processor", None) or [])
    priced = policy is not None and policy.prices is not None and settings.rule is None
    width = prompt.shape[1]
    least = [config.min_new_tokens or 0, (config.min_length or 0) - width]
    for one in processors:
        if isinstance(one, MinLengthLogitsProcessor):
            least.append(one.min_length - width)
        elif isinstance(one, MinNewTokensLengthLogitsProcessor):
            least.append(one.min_new_tokens + one.prompt_length_to_skip - width)
    plan = RowPlan(settings, token_format, eos_ids, step_stride, priced, max(least))
    named = {**vars(config), **kwargs}
    constraints = [name for name in _CONSTRAINTS if named.get(name) is not None]
    constraints += [type(one).__name__ for one in processors]
    if settings.rule is not None:
        asker: Any = settings.rule.asker(base, plan, tokenizer)
    elif policy is None or settings.mode is None:
        raise ValueError("stop_policy holds no rule, and there is no policy: pass one of the two")
    else:
        asker = Asked(base, policy, settings.price)
        more = config.max_new_tokens
        longest = (config.max_length or 0) if more is None else width + more
        check_length(base.config, max(width, longest), "prompt and answer")
        if settings.mode == "sample" and settings.seed is None:
            # From a copy: until its stop a row is what plain generate, seeded alike, would write.
            generator = torch.Generator().set_state(torch.get_rng_state())
            seed = int(torch.randint(2**62, (), generator=generator))
            plan = replace(plan, settings=replace(settings, seed=seed))
    hook = StopHook(plan, asker, records, on_step, constraints)
    with asker:
        # The class's own generate: an instance's may be a policy's `custom_generate`.
        output = type(base).generate(
            base,
            inputs,
            generation_config=given,
            logits_processor=LogitsProcessorList([*processors, hook]),
            stopping_criteria=StoppingCriteriaList([AnswerEnd(hook, others, strings)]),
            **kwargs,
        )
    if plan.settings.seed != settings.seed:
        torch.rand(())  # greedy text drew nothing, and the next call shall draw anew
    if not isinstance(output, Tensor):
        output["stop"] = records
    return output, records
