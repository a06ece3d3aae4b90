"""The native kernels, for NumPy arrays and what shares their memory."""
