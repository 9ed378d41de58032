"""Verification: which drafted tokens the model itself would have chosen, and which token it chooses after them.

``verify`` takes a batch's `Chooser` objects (one a request), its draft trees and the model's logits, and returns a
`Verification`. The engine cuts it where a request stops (`truncate`) and tells every chooser what was kept::

    chooser = Chooser(params, prompt_tokens, vocab_size)               # once a request
    outcome = verify(choosers, trees, logits)                          # every step
    verdicts = truncate(outcome.verdicts, keep)
    for b, chooser in enumerate(choosers):
        chooser.commit(verdicts.tokens_of(b), outcome.states[b])
"""

from outpace.verify.chooser import Chooser
from outpace.verify.greedy import greedy_verdicts
from outpace.verify.logprobs import TokenLogprobs, token_logprobs
from outpace.verify.processors import LogitsPipeline
from outpace.verify.sampling import gumbel_argmax, gumbel_noise
from outpace.verify.verdicts import truncate, verdicts_of
from outpace.verify.walk import Verification, verify

__all__ = [
    "Chooser",
    "LogitsPipeline",
    "TokenLogprobs",
    "Verification",
    "greedy_verdicts",
    "gumbel_argmax",
    "gumbel_noise",
    "token_logprobs",
    "truncate",
    "verdicts_of",
    "verify",
]
