"""What files of weights say about themselves beside their tensors, where several parts of the program must know it."""

ROTARY_METADATA = "osora.rotary"
"""Metadata key under which a converted MMDiT says how its rotary pairs lie: `interleaved` or `half`."""
