"""Compare schemes: runs of schemes x tasks x seeds, statistics, a report."""
