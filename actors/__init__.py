"""Everything that has an inbox, and the kit it is made of."""
