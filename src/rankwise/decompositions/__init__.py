"""The ways to decompose a layer, one file each."""
