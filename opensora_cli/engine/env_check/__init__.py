"""`osora env-check`: whether this machine can run osora, and what keeps it from doing so.

`facts` (and `core.gpus`) read the machine, one small function for each fact; the other modules judge facts.
"""
