"""Layer-major accumulation: every micro-batch passes a block before the next block."""
