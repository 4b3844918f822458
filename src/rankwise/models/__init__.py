"""MODEL specifications to networks with weights."""
