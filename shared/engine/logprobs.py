"""Log probabilities of a chosen token and of the likeliest ones."""

import math

import numpy as np
import numpy.typing as npt

from shared.domain.ids import TokenId
from shared.domain.sampling import TokenLogprobs
from shared.engine.drawing import likeliest


def token_logprobs(logits: npt.NDArray[np.float32], token_id: TokenId, num_top: int) -> TokenLogprobs:
    """By log-softmax of the logits [vocab] after bias and penalties and before temperature and cuts.

    So they are what the model thinks as the request has bent it, the same at every temperature. Tokens that
    `min_tokens` makes impossible are not among the likeliest.
    """
    highest = logits.max()
    with np.errstate(over="ignore", under="ignore"):
        total = float(np.exp(logits - highest).sum(dtype=np.float64))
    log_total = float(highest) + math.log(total)
    top = likeliest(logits, num_top)
    return TokenLogprobs(
        logprob=float(logits[token_id]) - log_total,
        top=tuple((TokenId(int(place)), float(logits[place]) - log_total) for place in top if logits[place] > -np.inf),
    )
