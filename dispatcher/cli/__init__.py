"""The command line: one module per command or group of commands.

Data goes to stdout, words to stderr; what is data also comes as JSON. A command returns an `exits.Exit`, and raises
`DispatcherError` for what a person can act on: `main` prints it, without a stack trace. Modules load when their command
is called.
"""
