"""Weights: fetched before their use, kept, evicted, changed.

Callers use `cache.WeightCache` and nothing behind it. `state.Weights` has the facts about one unit;
each of its fields has one writer, which its docstring names. `access_order.py` and `eviction.py`
are pure: the simulated step uses them, too.
"""
