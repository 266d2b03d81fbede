"""Looking inside one execution's trajectory tree: on a terminal and as one HTML page."""
