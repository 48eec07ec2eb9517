"""`osora bench-comm`: whether the links between ranks are good, by nccl-tests' conventions."""
