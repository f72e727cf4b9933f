"""Which state there is: units and their layout, their placement, and the store that holds them."""
