"""From tables and a budget to a plan: numbers only, no modules."""
