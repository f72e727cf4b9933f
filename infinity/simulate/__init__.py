"""The predicted step: pure functions over sizes and rates, without torch and without a clock."""
