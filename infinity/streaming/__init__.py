"""One file for each kind of training state: weights, gradients, moments, masters, activations."""
