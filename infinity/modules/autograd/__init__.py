"""What autograd sees: the hooks of modules, the compute parameters, and their gradients."""
