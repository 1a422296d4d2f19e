"""Making labels and fitting stopping policies.

One concept, one module; nothing is imported here:

    traces        problems become prompts, prompts become sampled traces
    labels        the answer forced and graded at every step: a `datasets` dataset
    label_folder  where labels lie: journal, Parquet shards, manifest; survives kills
    packing       labelled traces as batches; cached hidden states of the trunk
    packed_trunk  the frozen trunk on several traces in a line
    objective     the expected reward as a loss (OS-Pruner)
    baselines     the losses of the classification probe and of answer convergence
    fast_tail     the policy's last layer computed at step ends only (Qwen2, Llama)
    settings      what a training run is: method, schedule, optimiser
    schedules     the paper's lambdas, and some made for the labels at hand
    from_labels   training on stored labels (`ospruner train`)
    stage_report  what a run tells at its end
    run_folder    the folder of a training run: checkpoint, log, policies
    policies      a fresh policy, its loss, its predictions; a stage's result
    checks        what a training run refuses before it starts
    run           one run: a policy, its optimiser, its place in the schedule
    loop          annealing through the length penalties, of one target or several
    progress      the callback by which long work tells what is done
    durable       fsync, atomic replacement, the lock on a folder
"""
