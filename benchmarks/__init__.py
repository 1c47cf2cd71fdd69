"""Measurements of a host's performance. The documentation gives, for every figure, the command here that printed it."""
