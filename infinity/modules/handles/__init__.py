"""Objects that a user holds outside a module: handles, and the tensors that stand for them.

A model that is only trained, as by `loss.backward()` and `optimizer.step()`, uses little of it.
"""
