"""osora: run, train, measure and convert Open-Sora 2.0 on today's PyTorch."""

__version__ = "0.1.0"
