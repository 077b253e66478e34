"""Which tokens of an answer a mask of the server left as the policy has them. Pure.

A mask leaves the allowed set S of tokens and shares the probability of the others among them:
mu(a) = pi(a) / Z for a in S, with Z = pi(S). So the recorded log-probability is log pi(a) - log Z,
above the recomputed one by -log Z >= 0, the same for every token that could have been sampled
there. To keep the tokens whose recorded value is not above the recomputed one is therefore a choice
of places, made before the token is drawn, and not of tokens: it does not bias the gradient at the
places that are kept. docs/losses.md has the bound for masks that hide below the tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence


def untouched(differences_S: Sequence[float], tolerance: float) -> tuple[bool, ...]:
    """Return [S] True where no mask shows: recorded - recomputed is at most the tolerance, in nats.

    Values below are no mask: a mask makes what it allows likelier. They stay, and so does what is
    no number, for the check of drift to see.
    """
    return tuple(not difference > tolerance for difference in differences_S)
