"""State as a directory of torch.distributed.checkpoint."""
