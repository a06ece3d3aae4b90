"""Recorders of the backward of attention, one module per system, and the count that they share."""
