"""The command line: one module per command or group of commands.

Data goes to stdout, also as JSON with `--json`. Messages go to stderr. A command returns an `exits.Exit`. For a fault
that an operator can fix, the command raises `DispatcherError`, which `main` prints without a stack trace. A command's
module is imported when the command is called.
"""
