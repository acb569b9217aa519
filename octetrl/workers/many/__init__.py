"""A run on many workers, whatever carries the calls between them (workers/ray.py)."""
