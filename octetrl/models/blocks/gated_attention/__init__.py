"""Attention whose output has a gate."""
