"""`osora train`, read in this order.

`run` is the whole journey. `plan` decides before anything is built, `ranks` starts and joins processes, `build` makes
the task and its batches from `objectives/`, with `transformer` and `lora` for the transformer, and `parallelize` shards
it between the ranks of a `distribution`. `trainer` does the steps: `optimizer`, `schedules`, `precision` and `ema`
update the weights, and `activations` holds what the backward pass needs. `metrics` logs with the times of `clock`, and
`evaluate` validates and samples. `state` names every tensor of a run, `checkpoints` saves them, and `resuming` chooses
the one to continue from. `estimate` and `rank_memory` predict the memory.
"""
