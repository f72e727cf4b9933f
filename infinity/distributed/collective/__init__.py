"""Operations of the devices of all ranks: in which order they begin, and what they carry."""
