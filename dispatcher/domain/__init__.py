"""Values and rules: emails, their statuses, provider outcomes and decisions. Standard library only, no I/O."""
