"""A game with several turns: the model guesses a number, and the game replies "Higher." or "Lower.".

In a recipe: `environment: {kind: python, dataset: examples.number_game:NumberGame}`
"""

import random
import re

from octetrl import Conversation, Task, metric, reward

HIGHEST, GUESSES = 20, 6


def game(place: int) -> Task:
    """A task with a unique prompt: two tasks with equal prompts count as one."""
    number = random.Random(place).randint(1, HIGHEST)
    prompt = f"Game {place}: find my number, from 1 to {HIGHEST}."
    return Task(id=f"game/{place}", prompt=prompt, metadata={"number": number})


class NumberGame:
    tasks = tuple(game(place) for place in range(1000))

    def start(self, conversation: Conversation) -> None:
        """Called once for each rollout. Store the rollout's data in `conversation.state`."""
        conversation.state.found = False
        conversation.state.guesses = []

    def reply(self, conversation: Conversation) -> str | None:
        """Reply to the model's last message; None ends the game."""
        guess = re.search(r"\d+", conversation.text)
        if guess is None:
            return "Guess a number."
        conversation.state.guesses.append(int(guess[0]))
        number = conversation.task.metadata["number"]
        conversation.state.found = int(guess[0]) == number
        if conversation.state.found or conversation.turns == GUESSES:
            return None
        return "Higher." if int(guess[0]) < number else "Lower."

    @reward
    def found(self, conversation: Conversation) -> float:
        return conversation.state.found

    @reward(weight=0.2)
    def quick(self, conversation: Conversation) -> float:
        """The share of the guesses that were not used."""
        return 1 - conversation.turns / GUESSES if conversation.state.found else 0.0

    @metric
    def repeated(self, conversation: Conversation) -> float:
        guesses = conversation.state.guesses
        return len(guesses) - len(set(guesses))
