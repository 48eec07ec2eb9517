"""`osora train`. Read the modules in this order.

`run` executes a whole run. `plan` makes all decisions before anything is built. `distribution` starts and joins ranks.
`objectives/` has a module for each target, and `build` makes its task, with `transformer` and `lora` for the
transformer. `parallelize` gives a rank its part, and is the recipe for blocks: sharding, `activations` and compile.
`trainer` does the steps, and `optimizer` updates the weights and their averages. `metrics` logs, and `evaluate`
validates and samples. `state` names every tensor of a run, and `checkpoints` chooses, saves and removes them.
`estimate` predicts the memory of a step, and `predicted` its time.
"""
