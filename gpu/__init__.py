"""Verification in device memory. The CPU defines the answer; a device only has to equal it."""
