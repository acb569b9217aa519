"""Mixture of experts: a router chooses some of many small gated MLPs for each token."""
