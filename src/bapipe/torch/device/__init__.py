"""Devices of this machine: dtypes, the allocator, and copies to a GPU."""
