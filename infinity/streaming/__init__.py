"""How each kind of training state moves between its tier and the computation.

`weights/` brings the weights of a unit to the device before their use, keeps those that are used
soonest and lets the others go. `gradients/` takes gradients from autograd, sums them and keeps the
sums where they rest. `inputs/` keeps layer inputs between a forward and its backward. The update
of weights by the optimizer is here, too: it reads sums from `gradients/`, and checks weights out of
`weights/`. Each room knows `state/`, `tiers/` and `storage/`, which are below; `weights/` and
`gradients/` do not know each other. `passes.py` tells every room which pass runs.
"""
