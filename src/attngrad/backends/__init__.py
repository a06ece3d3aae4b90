"""Backends: what computes the passes."""
