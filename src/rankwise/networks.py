"""`rankwise.networks.build`: any MODEL specification becomes a network (models/networks.py)."""

from rankwise.models.networks import architecture, build, default_input, fit_spec, has_random_weights, load_weights_

__all__ = ["architecture", "build", "default_input", "fit_spec", "has_random_weights", "load_weights_"]
