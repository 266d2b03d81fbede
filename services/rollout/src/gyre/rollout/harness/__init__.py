"""How a harness is started, adopted, limited and killed."""
