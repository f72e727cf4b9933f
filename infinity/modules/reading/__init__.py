"""A model before it is offloaded: its units, its dtypes, and where its values come from.

Nothing here runs once a model is offloaded.
"""
