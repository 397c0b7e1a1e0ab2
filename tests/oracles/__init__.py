"""Slow and obvious answers, written from the papers' equations and the public contract, that the engine is held to."""
