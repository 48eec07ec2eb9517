"""`osora train`. Read the modules in this order.

`run` executes a whole run. `early` refuses wrong requests without torch, and `plan` makes all decisions before anything
is built. `distribution` joins ranks. `objectives/` has a module for each target, and `build` makes its task, with the
transformer and its `lora`. `parallelize` gives a rank its part, and is the recipe for blocks: sharding, checkpointing
and compile; `memory` decides what waits on the host. `trainer` does the steps, and `optimizer` updates the weights and
their averages. `metrics` logs, and `evaluate` validates and samples. `checkpoints` names every tensor of a run, and
chooses, restores, saves and removes checkpoints. `estimate` predicts the memory of a step, and `predicted` its time.
"""
