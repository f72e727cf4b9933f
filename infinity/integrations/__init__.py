"""Where other libraries own the training loop. Each module imports its library when it is used."""
