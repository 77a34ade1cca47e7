"""How probable a token was, and which others were more so."""

import numpy as np

from kvsieve.engine.outputs import TokenLogprob, TokenLogprobs
from kvsieve.engine.sampling import largest
from kvsieve.types import F32


def token_logprobs(logits: F32, token: int, *, top: int) -> TokenLogprobs:
    """Natural logarithms of softmax(logits), computed in float64.

    Parameters
    ----------
    logits : f32 ``[vocab]``, as the model gave them
    token : the one that was chosen
    top : how many of the most probable to name, ties to the lower id
    """
    best = np.float64(logits.max())
    total = best + np.log(np.exp(logits.astype(np.float64) - best).sum())
    ids = largest(logits, min(top, logits.size)) if top else np.empty(0, np.int64)
    return TokenLogprobs(
        logprob=float(logits[token] - total),
        top=tuple(TokenLogprob(token_id=int(i), logprob=float(logits[i] - total)) for i in ids),
    )
