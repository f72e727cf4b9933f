"""Large layers that run as tiles: some rows, or some experts, at a time."""
