"""Measurements of what a host can do. Every figure in the documentation names the command here that printed it."""
