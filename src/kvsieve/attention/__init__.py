"""Block selection and sparse attention on plain arrays: masks, selectors, and the oracle."""
