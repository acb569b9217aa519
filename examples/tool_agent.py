"""An agent with a tool: only the tool can read the list of today's prices.

In a recipe: `environment: {kind: python, dataset: examples.tool_agent:Shop}`; recipes/demo_tools.yaml trains on it.
"""

import random

from octetrl import Conversation, Task, ToolError, metric, reward, tool

THINGS = ("bread", "cheese", "honey", "milk", "olives", "plums", "rice", "tea")


def days(count: int) -> list[Task]:
    """One task per day: the thing to ask for, and the prices of the day."""
    chance, tasks = random.Random(0), []
    for day in range(count):
        prices = {thing: chance.randrange(10) for thing in THINGS}
        thing = chance.choice(THINGS)
        name = "".join(chance.choice("abcdefgh") for _ in range(4))
        prompt = f"Day {name}. Price of {thing}?"
        tasks.append(Task(f"day/{day}", prompt, answer=str(prices[thing]), metadata={"prices": prices, "thing": thing}))
    return tasks


@tool
async def price(thing: str) -> int:
    """What a thing costs today."""
    prices: dict[str, int] = Conversation.current().task.metadata["prices"]
    if thing not in prices:
        raise ToolError(f"no {thing} today")  # this text is reported to the model
    return prices[thing]


class Shop:
    tasks = days(2000)
    tools = (price,)

    @reward
    def right(self, conversation: Conversation) -> float:
        return conversation.text.strip() == conversation.task.answer

    @metric
    def asked(self, conversation: Conversation) -> float:
        return conversation.tool_calls > 0
