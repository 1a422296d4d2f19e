"""Making labels (`labels/`) and fitting stopping policies; `toy/` is the embedded reasoner.

settings       what a training run is: method, schedule, optimiser
trunk          the frozen layers on packed traces, and the batches they make
tail           the policy's logits at step ends
objective      the losses
fresh          a policy before, while and after it is trained
run, loop      one run with its folder; annealing through the length penalties
processes      several processes, through accelerate
memory         what a run will hold
flashthink     the verifier baseline
from_labels    `ospruner train`
"""
