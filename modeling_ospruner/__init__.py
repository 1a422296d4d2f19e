"""OS-Pruner's model: a reasoning model that stops thinking at the right paragraph.

Importing this package lets `AutoModel` and `AutoModelForCausalLM` load policies without
`trust_remote_code`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_ospruner import VERSION, OSPrunerConfig
from .formats_ospruner import ReasoningFormat, TokenFormat
from .generation_ospruner import generate_pruned
from .modeling_ospruner import OSPrunerForCausalLM
from .policy_ospruner import StoppingPolicy
from .stopping_ospruner import RuleLike, StopPolicyConfig, StopRecord, uniform

__version__ = VERSION

AutoConfig.register("ospruner", OSPrunerConfig)
AutoModel.register(OSPrunerConfig, OSPrunerForCausalLM)
AutoModelForCausalLM.register(OSPrunerConfig, OSPrunerForCausalLM)

__all__ = ["OSPrunerConfig", "OSPrunerForCausalLM", "ReasoningFormat", "RuleLike"]
__all__ += ["StopPolicyConfig", "StopRecord", "StoppingPolicy", "TokenFormat"]
__all__ += ["generate_pruned", "uniform"]
