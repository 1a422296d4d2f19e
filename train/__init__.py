"""Making labels (`labels/`) and fitting stopping policies.

config, prices      what a run is: `StopConfig`; prices of a token to train for
trainer             `StopTrainer`: transformers' Trainer with the objective and stages of prices
objective           the losses
tail                the policy's logits at step ends
traces              labelled traces, what a policy says on them, and which are computed together
states              what a tail reads of them: computed packed, and kept
policies            a fresh policy for labels, and what is saved of a trained one
label_sets          the labels of a run and the model that made them: what is refused
untrained           fresh copies of its last layers, and adapters beside them
flashthink          the verifier baseline
run_folder          whose a run's folder is, and where a stopped run goes on
sinks               attention with sinks in fused kernels
"""

import logging

# transformers' TrainingArguments import peft, and that bitsandbytes, which warns on CPUs of a
# package that only its own 4-bit layers would use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
