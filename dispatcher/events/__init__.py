"""What providers report after they accepted an email: receives, verifies, stores and applies their events."""
