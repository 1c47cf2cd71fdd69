"""Values and rules: what an email is, what can become of it, what a provider can say. Standard library only, no I/O."""
