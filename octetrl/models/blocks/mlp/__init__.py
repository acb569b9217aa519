"""The gated MLP."""
