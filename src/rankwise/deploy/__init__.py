"""Export to other runtimes, and the measured time of the result."""
