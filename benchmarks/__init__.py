"""What a host can do, measured. Every figure that the documentation quotes names the command here that printed it."""
