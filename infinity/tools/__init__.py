"""Programs around the engine, which imports none: the command, training, benches, the doctor."""
