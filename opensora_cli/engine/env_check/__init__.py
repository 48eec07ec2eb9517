"""`osora env-check`: checks of this machine, each with a fix."""
