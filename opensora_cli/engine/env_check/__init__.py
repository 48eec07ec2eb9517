"""`osora env-check`: whether this machine can run osora, and what keeps it from doing so.

`reading` finds facts, one small function for each; the other modules judge facts and never look at the machine.
"""
