"""The same job, done by other task queues and by a mail queue, to compare these peers with our dispatcher.

Each peer's code is written as its users would write it. `run.py` measures the peers and our dispatcher in one run.
Every peer has its own environment. A peer's code is in the folder of its name and in `application.py`, which all peers
share. This code does not import the dispatcher.
"""
