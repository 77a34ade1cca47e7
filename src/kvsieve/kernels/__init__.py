"""Numeric primitives behind one `Backend` protocol: `reference` (NumPy) and `native` (C++)."""
