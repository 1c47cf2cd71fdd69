"""The same job done by other task queues and a mail queue, as their users would write it, to compare with ours.

`run.py` measures them and us in one run. Every peer has its own environment. The code for it is in the folder of its
name and in `application.py`, which all peers share. That code imports nothing of ours.
"""
