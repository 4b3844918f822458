"""What is true without a network: folds, layers, options and their costs, moments, files."""
