"""The predicted step: pure functions of sizes and rates, without torch and without a clock."""
