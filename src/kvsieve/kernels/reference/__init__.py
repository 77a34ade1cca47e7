"""The specification in NumPy: what every native kernel must compute.

Written to be read. Each module is one idea of block-sparse attention; read them in this order:

``selection``          which blocks a query reads: scores, budget, ties (pure functions)
``attention``          exact softmax over a list of blocks, run by run
``logits``             scaled dot products over each cache type
``quantize``           rows of numbers as small integers with a scale
``pages``              where those integers lie in a page of the cache
``segment_selection``  the rules of ``selection``, fed from pages
``dense``, ``layer``   the rest of a decoder layer
``backend``            all of it behind the `Backend` protocol
"""

from kvsieve.kernels.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
