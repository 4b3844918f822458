"""Recipes, the loop, evaluation, and the steps train, retrain and iterate."""
