"""Environments with several turns: what an author writes, and how it is run.

from octetrl.environments.turns import Conversation, reward

class Guess:
    tasks = [Task(id=str(n), prompt="Guess my number from 1 to 9.", answer=str(n)) for n in range(1, 10)]

    def reply(self, conversation: Conversation) -> str | None:
        return None if conversation.text == conversation.task.answer else "No. Guess again."

    @reward
    def guessed(self, conversation: Conversation) -> float:
        return conversation.text == conversation.task.answer
"""

from octetrl.environments.turns.conversation import Conversation, Message, metric, reward

__all__ = ["Conversation", "Message", "metric", "reward"]
