"""Everything that knows another rank."""
