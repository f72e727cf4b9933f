"""Training loops of other libraries. Each module imports its library when it is used."""
