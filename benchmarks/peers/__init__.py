"""What others make of the same job: task queues and a mail queue, as their users would write it, beside ours.

`run.py` measures them and us in one run. Every peer has an environment of its own; what runs there is in the folder of
its name, with `application.py`, which they share. That code imports nothing of ours.
"""
