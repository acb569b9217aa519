"""What a recipe may not ask of several workers."""

from __future__ import annotations

from octetrl.algorithms.table import Algorithm
from octetrl.config.errors import UserError
from octetrl.config.schema import Recipe
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.trainer.peers import Peers


def check_peers(recipe: Recipe, policy: PrecisionPolicy, algorithm: Algorithm, peers: Peers) -> None:
    """UserError: settings that need whole BF16 weights, which none of several workers has."""
    if peers.share.count == 1 or not policy.uses_fp8("train"):
        return
    if recipe.trainer.weight_codes == "remade":
        raise UserError(
            "trainer.weight_codes: remade quantises whole weights, and each of several workers has only some rows of"
            " them; use weight_codes: kept, or one worker"
        )
    if algorithm.reference_every and recipe.model.lora is None:
        raise UserError(
            "algorithm.reference_every: several workers keep only the FP8 codes of the reference, which does not"
            " change; set it to 0, or use model.lora or one worker"
        )
