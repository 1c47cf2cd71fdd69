"""`python -m dispatcher` runs the same command line as `dispatcher`."""

import sys

from dispatcher.cli.main import program

sys.exit(program())
