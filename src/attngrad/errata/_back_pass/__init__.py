"""What the classes of Self-Attention Gradients Calculation for Back Pass compute, and the examples below them."""
