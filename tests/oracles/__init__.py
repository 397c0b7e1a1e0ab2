"""Slow and obvious answers, written from the papers' equations and the public contract, that the engine is held to."""

import os

# Triton reads this when it is imported, and again with every kernel: the tests run kernels in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")
