"""Rows to figures, tables and one HTML page."""
