"""gyre: start, train, status, report."""
