"""Measurements of a host's performance. The documentation names, for every figure, the command that printed the
figure."""
