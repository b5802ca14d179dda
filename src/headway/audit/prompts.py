"""What an audit asks: some texts that repeat themselves, so that lookups draft, and some that do not."""

from __future__ import annotations

PROMPTS = (
    "red blue green red blue green red blue green red blue",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the",
    "one two three one two three one two one three two one two three one",
    "a b a b a c a b a b a c a b a",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n    return",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age": 41}\n{"name": "Grace", "age":',
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "Once upon a time there was a",
    "Water boils at a temperature of",
    "My favourite animals are cats, dogs,",
    "- milk\n- eggs\n- bread\n- milk\n- eggs\n-",
    "She said that he said that she said that he",
    "import numpy as np\nimport pandas as pd\nimport",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(",
    "To be, or not to be, that is the question: To be, or not",
    "1 2 3 4 1 2 3 5 1 2 3 4 1 2 3",
)

# Long enough to fill blocks of a prefix cache.
LONG_PROMPTS = tuple(
    f"Report {number}. " + " ".join(f"On day {day} the team of {town} wrote {day * number} lines and drank {day + number} cups." for day in
    range(1, 6)) + " On day"
    for number, town in ((3, "Bonn"), (5, "Oslo"), (7, "Lyon"), (9, "Bern"))
)  # fmt: skip

CHAT = "Give me the name and the age of an invented person."
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
