"""The optimizers: classes of `torch.optim.Optimizer` over state that rests on tiers."""
