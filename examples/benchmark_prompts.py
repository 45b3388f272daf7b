"""Prompts for the benchmark of the spine, written for this project.

Copy-heavy ones repeat a 60-line function with one change, and a passage that is quoted; chat ones
have little to copy. Each is (name, messages or text).
"""

from __future__ import annotations

FUNCTION = '''\
def summarize_orders(orders, currency="EUR", minimum=0.0):
    """Group orders by customer and add up what each of them paid."""
    totals = {}
    counts = {}
    largest = {}
    skipped = []
    for order in orders:
        customer = order.get("customer")
        if customer is None:
            skipped.append(order)
            continue
        if order.get("currency", currency) != currency:
            skipped.append(order)
            continue
        amount = 0.0
        for item in order.get("items", []):
            price = float(item["price"])
            quantity = int(item.get("quantity", 1))
            discount = float(item.get("discount", 0.0))
            amount += price * quantity * (1.0 - discount)
        shipping = float(order.get("shipping", 0.0))
        amount += shipping
        if amount < minimum:
            skipped.append(order)
            continue
        if customer not in totals:
            totals[customer] = 0.0
            counts[customer] = 0
            largest[customer] = 0.0
        totals[customer] += amount
        counts[customer] += 1
        if amount > largest[customer]:
            largest[customer] = amount
    rows = []
    for customer in sorted(totals):
        total = totals[customer]
        count = counts[customer]
        average = total / count
        row = {
            "customer": customer,
            "orders": count,
            "total": round(total, 2),
            "average": round(average, 2),
            "largest": round(largest[customer], 2),
            "currency": currency,
        }
        rows.append(row)
    rows.sort(key=lambda row: row["total"], reverse=True)
    grand_total = sum(row["total"] for row in rows)
    for row in rows:
        if grand_total > 0:
            row["share"] = round(row["total"] / grand_total, 4)
        else:
            row["share"] = 0.0
    report = {
        "rows": rows,
        "grand_total": round(grand_total, 2),
        "skipped": len(skipped),
    }
    return report
'''

PASSAGE = """\
The lighthouse at the end of the northern pier was built in 1871, after three grain ships had run \
aground on the shoals in a single winter. Its lamp burned rapeseed oil for the first twenty years, \
and the keeper climbed the ninety-four steps four times every night to trim the wick. When the \
harbour was electrified the keeper stayed on, at first to watch the machine, and later because \
nobody had thought of telling him to leave. He kept a notebook in which he wrote down the name of \
every vessel that passed, the direction of the wind, and what he had eaten for supper. The \
notebooks fill two shelves of the town library today, and historians have used them to date storms \
that no newspaper mentions. In the summer of 1934 a school class from the next town visited the \
tower, and one of the children asked him whether he was ever lonely. He answered that a man who \
counts ships is never alone, since every ship has a crew, and every crew has somebody who is \
looking at the light."""

COPY: list[tuple[str, str, str]] = [
    # name, the user's message, how the answer starts
    (
        "code-edit",
        "Change the default currency of this function from EUR to USD and leave everything else as "
        f"it is. Answer with the whole function.\n\n```python\n{FUNCTION}```",
        '```python\ndef summarize_orders(orders, currency="USD", minimum=0.0):\n'
        '    """Group orders by customer and',
    ),
    (
        "quoted-passage",
        f"Quote this passage word for word.\n\n{PASSAGE}",
        "The lighthouse at the end of",
    ),
]

CHAT: list[tuple[str, str]] = [
    ("sky", "Why is the sky blue? Explain it to a ten-year-old."),
    ("dinner", "What could I cook tonight with rice, tomatoes and two eggs?"),
    (
        "interview",
        "I have a job interview tomorrow and I am nervous. What should I do this evening?",
    ),
    ("rome", "Why did the Roman republic become an empire?"),
    ("cat", "Write a short story about a cat that is afraid of mice."),
    ("sleep", "How much sleep does an adult need, and why?"),
    ("python", "What is the difference between a list and a tuple in Python?"),
    ("garden", "Which vegetables are easy to grow on a balcony?"),
    ("moon", "What would happen to the tides if the moon disappeared?"),
    ("letter", "Write a polite letter to my landlord about a broken heating."),
]
