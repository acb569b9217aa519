"""Causal self-attention with grouped queries."""
