"""Gradients: taken from autograd, summed, measured, and kept where they rest.

Callers use `sink.GradientSink`: `store.GradientStore` on one rank, and over ranks
`distributed.sums.reduce.DistributedGradients`, which has two such stores.
"""
