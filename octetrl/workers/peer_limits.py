"""What a recipe may not ask of several workers."""

from __future__ import annotations

from octetrl.config.errors import UserError
from octetrl.config.schema import Recipe
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.trainer.peers import Peers


def check_peers(recipe: Recipe, policy: PrecisionPolicy, peers: Peers) -> None:
    """UserError: settings that need whole BF16 weights, which none of several workers has."""
    if peers.share.count == 1 or not policy.uses_fp8("train"):
        return
    if recipe.trainer.weight_codes == "remade":
        raise UserError(
            "trainer.weight_codes: remade quantises whole weights, and each of several workers has only some rows of"
            " them; use weight_codes: kept, or one worker"
        )
