"""Role transitions as traces: from the processes' span files to a tree, a page, and a figure for what is not covered."""
