"""`osora train`. Read the modules in this order.

`run` executes a whole run. `plan` makes all decisions before anything is built. `ranks` starts and joins processes.
`objectives/` has a module for each target, and `build` makes its task, with `transformer` and `lora` for the
transformer. `parallelize` shards it between the ranks of a `distribution`. `trainer` does the steps: `optimizer`,
`precision` and `ema` update the weights, and `activations` manages activations for the backward pass. `metrics` logs,
and `evaluate` validates and samples. `state` names every tensor of a run, `checkpoints` saves them, and `resuming`
chooses the checkpoint. `estimate` and `rank_memory` predict the memory.
"""
