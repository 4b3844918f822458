"""From a plan to a network and back: modules, coverage, replacement, folders."""
