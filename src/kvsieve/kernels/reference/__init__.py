"""The specification in NumPy: what every native kernel must compute.

Written to be read. Each module is one idea of block-sparse attention, from the choice of blocks
(`selection`) to the whole decoder layer (`layer`).
"""
