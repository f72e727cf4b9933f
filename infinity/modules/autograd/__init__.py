"""The parts that autograd sees: hooks of modules, compute parameters, and their gradients."""
