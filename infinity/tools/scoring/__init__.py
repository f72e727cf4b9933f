"""`infinity score`: log-probabilities of texts; one read of the weights for many texts."""
