"""The backward pass, worked: numbers, formulas and the invariants that must hold."""
