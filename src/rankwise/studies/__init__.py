"""Grids of runs that resume: cells, rows, workers."""
