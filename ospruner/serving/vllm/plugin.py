"""The policy inside vLLM: what vLLM calls when it starts, and what it is told then.

`ospruner.serving.start` calls `register` in each of vLLM's processes, also where it serves
something else: nothing is imported here that vLLM has not imported by then. While vLLM makes the
configuration of a policy, and of nothing else, it asks `ServedPolicy`, which names what stops: so
the stock command needs no option. An entry point of `vllm.logits_processors` would do so in every
vLLM of the host, and end those that cannot import it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..requests import DEFAULTS, StopRequest

ARCHITECTURE = "OSPrunerForCausalLM"
# Among a request's extra arguments: the name by which its reply is told how its texts ended.
REPLY = "ospruner_reply"
# What `--reasoning-parser` is given: where a marker ends the thinking, and for Harmony, GPT-OSS's.
PARSER, HARMONY_PARSER = "ospruner", "ospruner_harmony"
_PROCESSORS = (f"{__package__}.runner_v1:V1Processor", f"{__package__}.runner_v2:V2Processor")
_WORKER_EXTENSION = f"{__package__}.processor.StopRecords"
# What is known of a base's model that keeps states.
_ROOM = ("has_inner_state", "is_hybrid", "supports_mamba_prefix_caching", "supports_replayssm")


class Defaults:
    """A server's defaults."""

    here = StopRequest(None, server=True)  # of the server, or engine, that was made last here
    config: Any = None  # of its policy

    @staticmethod
    def of(vllm_config: Any) -> StopRequest:
        """Those in vLLM's `--additional-config`; ValueError where they are wrong."""
        additional = vllm_config.additional_config
        said = additional.get(DEFAULTS) if isinstance(additional, dict) else None
        return StopRequest(said, f"additional_config[{DEFAULTS!r}]", server=True)


class ServedPolicy:
    """What vLLM asks of an architecture when it makes a configuration (`MODELS_CONFIG_MAP`)."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Called first: what vLLM makes room for is what the base keeps."""
        text = model_config.hf_config.get_text_config()
        if is_recurrent(text):
            info, _ = model_config.registry.inspect_model_cls([architecture(text)], model_config)
            kept = {name: vars(info)[name] for name in _ROOM}
            model_config._model_info = replace(model_config._model_info, **kept)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Sets what stops, in the model runner that vLLM has chosen, and how replies are split.

        Raises:
            ValueError: the server's defaults are wrong for this policy, or speculative decoding is
                on in V1.
        """
        model, v2 = vllm_config.model_config, vllm_config.use_v2_model_runner
        if vllm_config.speculative_config is not None and not v2:
            raise ValueError(
                "speculative decoding is on, and vLLM's model runner V1 works with no processor "
                "beside it, hence with no policy: leave --speculative-config out, or set "
                "VLLM_USE_V2_MODEL_RUNNER=1"
            )
        Defaults.here, Defaults.config = Defaults.of(vllm_config), model.hf_config
        Defaults.here.settle(Defaults.config)
        model.logits_processors = [*(model.logits_processors or ()), _PROCESSORS[v2]]
        parallel, structured = vllm_config.parallel_config, vllm_config.structured_outputs_config
        parallel.worker_extension_cls = parallel.worker_extension_cls or _WORKER_EXTENSION
        if not structured.reasoning_parser:
            structured.reasoning_parser = parser_of(model.hf_config.reasoning_format or {}) or ""


def architecture(text: Any) -> str:
    """The name of transformers' class of a base; vLLM's goes by the same."""
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type]


def is_recurrent(text: Any) -> bool:
    """Whether some of a base's layers keep a state in place of keys, as its configuration says."""
    kinds = set(vars(text).get("layer_types") or ())
    return bool(kinds - {f"{one}_attention" for one in ("full", "sliding", "chunked")})


def parser_of(literals: Mapping[str, Any]) -> str | None:
    """The reasoning parser of what a policy's format holds, whatever its name.

    None where all of a reply is its content.
    """
    if not literals.get("think_end"):
        return None
    return HARMONY_PARSER if "<|channel|>" in literals["closing"] else PARSER


def register() -> None:
    """Tells this process's vLLM about policies; transformers knows them once this is imported."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.reasoning import ReasoningParserManager

    ModelRegistry.register_model(ARCHITECTURE, f"{__package__}.model:OSPrunerVLLM")
    MODELS_CONFIG_MAP[ARCHITECTURE] = ServedPolicy
    for name, parser in ((PARSER, "ThinkingParser"), (HARMONY_PARSER, "HarmonyThinkingParser")):
        ReasoningParserManager.register_lazy_module(name, f"{__package__}.parser", parser)
