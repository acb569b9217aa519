"""Boxes: isolated file systems in which agents and rewards run commands, as containers or by bubblewrap."""
