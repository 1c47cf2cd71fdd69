"""What the processes say of themselves: log events now, metrics with the monitor; each declared once."""
