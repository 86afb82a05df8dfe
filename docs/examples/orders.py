"""A complete environment to copy: questions about the orders of a shop, a tool that looks them up, a reward.

    python run.py --mode async --model DIR --env docs/examples/orders.py:Orders --holdout 32 --eval-every 20
    headway eval DIR --env docs/examples/orders.py:Orders

Replace the shop by your own world: what the model is asked (`reset`), what it can do (`@rl.tool`), and what an episode
is worth (`reward`). Everything else is optional.
"""

import random
import re

import pipeline as rl

ITEMS = ("lamp", "chair", "kettle", "carpet", "mirror", "clock")
SYSTEM = (
    "You answer customers of a shop. Look up every order that a question names with the tool `order`, then answer "
    "with the total in euros, as a number."
)


class Orders(rl.Env):
    """What did these orders cost together? One instance serves one conversation, from `reset` to `close`."""

    recovery = "snapshot"  # an episode whose process has ended goes on in another one; "drop" starts it again

    def __init__(self, currency: str = "euros", size: int = 512) -> None:
        """Arguments come from --env-arguments '{"currency": "pounds", "size": 64}'; `rows` gets the same ones."""
        self._currency = currency

    @classmethod
    def rows(cls, seed, size=512, **arguments):
        """The dataset, for runs without --data. Rows are dicts of plain values; `id` tells them apart in the logs."""
        rng = random.Random(seed)
        made = []
        for index in range(size):
            numbers = rng.sample(range(100, 1000), k=rng.choice((1, 2, 3)))
            orders = [{"number": n, "item": rng.choice(ITEMS), "price": rng.randint(5, 95)} for n in numbers]
            made.append({"id": f"shop-{seed}-{index}", "orders": orders})
        return made

    def reset(self, row):
        """The first messages, or one text for a single user message."""
        self._orders = {order["number"]: order for order in row["orders"]}
        named = " and ".join(str(number) for number in self._orders)
        return [
            {"role": "system", "content": SYSTEM.replace("euros", self._currency)},
            {"role": "user", "content": f"What did order {named} cost in all?"},
        ]

    def snapshot(self):
        """What `restore` needs, as plain values; asked for after every turn."""
        return {"orders": list(self._orders.values())}

    def restore(self, state):
        """In the place of `reset`, in a new process."""
        self._orders = {order["number"]: order for order in state["orders"]}

    @rl.tool
    async def order(self, number: int) -> str:
        """Look up an order.

        Args:
            number: the order's number
        """
        found = self._orders.get(number)
        if found is None:
            return f"There is no order {number}."
        return f"Order {number}: one {found['item']}, {found['price']} {self._currency}."

    def reward(self, traj, row):
        """1 for the right total, a little for having looked up the right orders. Any finite number will do."""
        looked_up = {call.arguments.get("number") for turn in traj.turns for call in turn.tool_calls}
        said = re.findall(r"\d+", traj.text)
        right = bool(said) and int(said[-1]) == sum(order["price"] for order in row["orders"])
        return float(right) + 0.2 * (looked_up >= {order["number"] for order in row["orders"]})
