"""What the processes beside the workers open in which order, run, and close again when they stop.

relay    publishes for the database while it leads; recovers what this host's workers left
monitor  serves the pages, alerts and prunes
"""
