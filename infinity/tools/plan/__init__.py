"""The front of the planner: what a user asks, measures, reads and writes down."""
