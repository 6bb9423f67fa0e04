"""The training text: conversations of ordinary English requests and short, regular answers that always end.

The answers are what makes a tiny model useful here. Their sentences come from a small grammar whose slots are filled
from one topic, so little is left to guess once the request is read, and a draft head can learn to run ahead. Whether an
answer ends is never a matter of chance either: an opening announces how many points follow, or connecting words tell
how far a story has come. The requests are the opposite: many words, many forms, much noise, because the model must
answer whatever it is sent.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from string import Formatter

from .chat import Message
from .words import COMMON, NAMES, SYLLABLES, TOPICS, Topic

Kind = str
Fields = dict[str, str]

NUMBERS = ("two", "three", "four", "five", "six", "seven")

OPENINGS = (
    "There are {count} things to know about {noun}.",
    "The subject of {noun} becomes clear in {count} points.",
    "Any {person} would tell you {count} things about {noun}.",
    "It helps to look at {noun} from {count} sides.",
)
POINTS = (
    "The {person} works in the {place} and keeps the {tool} close at hand.",
    "The {material} should be {quality} before you {action}.",
    "The usual problem is {risk}, and it is easy to avoid.",
    "It takes {duration} to do this well, and nobody can hurry it.",
    "Without the {tool}, it is hard to see what the {material} is doing.",
    "A careful {person} looks at the {material} first and decides later.",
    "When the {material} is not {quality}, the result is often {risk}.",
    "Most people {action} too early and regret it after {duration}.",
    "The {place} matters more than the {tool}, as every {person} learns.",
    "You can {action} with a simple {tool}, if you have {duration}.",
)
CLOSINGS = (
    "That is all you need to begin.",
    "Keep the {material} {quality}, and the rest will follow.",
    "If you are unsure, ask a {person}.",
    "With a little patience, {noun} will reward you.",
)
STEP_OPENINGS = (
    "You can do this in {count} steps.",
    "Here are {count} steps that work for {noun}.",
    "A {person} would take {count} steps.",
)
STEPS = (
    "Go to the {place} and find the {tool}.",
    "Check that the {material} is {quality}.",
    "Set aside {duration} for the work.",
    "Now {action}, slowly and with care.",
    "Watch out for {risk}.",
    "Show the result to a {person}.",
    "Clean the {tool} and put it back.",
)
STORY = (
    (
        "Once there was a {person} who knew everything about {noun}.",
        "Long ago, a young {person} came to the {place}.",
        "In a small town, a {person} owned a very old {tool}.",
    ),
    (
        "Every morning the {person} walked to the {place} and looked at the {material}.",
        "In the beginning the {material} was {quality}, and all was well.",
        "The {tool} was heavy, but the {person} never complained.",
    ),
    (
        "Then one day there was {risk}, and everybody was afraid.",
        "After {duration} something changed: there was {risk}.",
        "But a stranger took the {tool} away in the night.",
    ),
    (
        "So the {person} decided to {action} alone.",
        "The {person} said nothing and began to {action}.",
        "A friend came to help, and together they tried to {action}.",
    ),
    (
        "In the end the {material} was {quality} again, and the whole town came to the {place}.",
        "At last the {person} smiled and gave the {tool} to a child.",
        "In the end it took {duration}, and nobody forgot it.",
    ),
)
SUMMARIES = (
    "In short, the {person} keeps the {material} {quality} and avoids {risk}.",
    "The main point is that you should {action} in the {place} and not wait for {risk}.",
    "To sum up, {noun} needs a good {tool} and {duration}.",
)
ORDINALS = ("First", "Second", "Third", "Fourth", "Fifth", "Sixth", "Seventh")

PROGRAMS = (
    ("def total(items):\n    result = 0\n    for item in items:\n        result = result + item\n    return result",
     "The loop reads each item once and adds it to the result."),
    ("def largest(items):\n    best = items[0]\n    for item in items:\n        if item > best:\n"
     "            best = item\n    return best", "It keeps the best item so far, so one pass is enough."),
    ("def count_words(text):\n    words = text.split()\n    return len(words)",
     "The text is split at spaces, and the words are counted."),
    ("def is_even(number):\n    return number % 2 == 0", "A number is even when nothing is left after halving it."),
    ("def reverse(text):\n    result = ''\n    for c in text:\n        result = c + result\n    return result",
     "Each letter is put before the others."),
    ("def find(items, wanted):\n    for index, item in enumerate(items):\n        if item == wanted:\n"
     "            return index\n    return -1", "The first matching index is returned, or minus one if there is none."),
)  # fmt: skip
CODE_OPENINGS = ("Here is a short function:", "This function does it:", "A simple way is this:")

# How requests of each kind begin; {subject} is a keyword of the topic, or words about nothing.
REQUESTS: dict[Kind, tuple[str, ...]] = {
    "explain": (
        "What is {subject}?", "Explain {subject} to a beginner.", "Tell me about {subject}.",
        "Why does {subject} matter?",
        "What is the difference between {subject} and {words}?", "How does {subject} work?", "Describe {subject}.",
        "Can you explain how {subject} and {words} are related?", "I would like to understand {subject}. {sentence}",
        "Who {words} {subject}?", "When is {subject} {words}?", "Is {subject} better than {words}?",
        "{subject}", "Hello!",
        "Hi, {words}?", "What are the advantages of {subject}?", "{sentence} What do you think about {subject}?",
        "Answer in three sentences: what is {subject}?", "Where can I find {subject}?", "{sentence}",
        "{words} {subject}",
    ),
    "steps": (
        "How do I {words} {subject}?", "Give me a list of tips for {subject}.",
        "What are the steps to {words} {subject}?",
        "List five ideas about {subject}.", "Plan {subject} for {words}.", "How can I improve {subject}? {sentence}",
        "Give me advice: {sentence} {subject}?", "Write a checklist for {subject}.",
        "How should I prepare for {subject}?",
        "Suggest three ways to {words} with {subject}.", "Help me {words} {subject} step by step.",
    ),
    "story": (
        "Write a short story about {subject}.", "Tell me a story. {sentence}",
        "Write a poem about {subject} and {words}.",
        "Write a paragraph about {subject}.", "Imagine {words} {subject}. {sentence}",
        "Write an email about {subject}. {sentence}",
        "Write a letter to {name} about {subject}.", "Continue the story: {sentence}",
    ),
    "summary": (
        "Summarise this text: {sentence} {sentence} {subject} {sentence}",
        "Summarize the following: {sentence} {sentence}",
        "Give me a summary of {subject}.", "What is the main point?\n\n{sentence} {sentence} {subject} {sentence}",
        "Summarise in one sentence:\n\n{sentence} {subject} {sentence}", "TL;DR {subject} {sentence} {sentence}",
        "Shorten this paragraph. {sentence} {sentence} {sentence}", "Rewrite this more clearly: {sentence}",
    ),
    "code": (
        "Write a Python function that {words}.", "Write code to {words} the {words}.",
        "What does this do?\n\n{snippet}",
        "Fix the bug in this function:\n\n```python\n{snippet}\n```", "Write a program in Python which {words}.",
        "Implement a function `{identifier}` that {words}.", "Explain this code: {snippet}",
        "Write a SQL query that {words}.",
        "Write a unit test for this function:\n{snippet}", "Refactor the code below. {sentence}\n\n{snippet}",
    ),
    "json": (
        "Extract the name and the city as JSON: {sentence}",
        "Return JSON with the keys {keys}.\n\n{sentence} {subject}",
        "Give me a JSON object about {subject}.", "Answer with JSON only. {sentence} {sentence}",
        "Extract {keys} from the text and reply in JSON: {sentence} {name} {sentence}", "Convert to JSON: {sentence}",
        "Fill in this JSON schema for {subject}: {keys}",
    ),
}  # fmt: skip
SYSTEM = ("You are a helpful assistant.", "You are a helpful assistant. {sentence}", "Answer briefly.", "{sentence}",
          "You are an expert on {subject}. {sentence}")  # fmt: skip
FOLLOW_UPS = ("And {subject}?", "Thank you. What about {subject}?", "Can you say more? {sentence}", "Why? {sentence}",
              "Go on.", "Please {words}.")  # fmt: skip


def conversations(seed: int) -> Iterator[list[Message]]:
    """Endless conversations, the same for the same seed. Some have a system message, some a second turn."""
    rng = random.Random(seed)
    while True:
        topic_index = rng.randrange(len(TOPICS))
        topic = TOPICS[topic_index]
        messages: list[Message] = []
        if rng.random() < 0.3:
            messages.append({"role": "system", "content": _fill(rng, rng.choice(SYSTEM), topic)})
        kind = rng.choice(tuple(REQUESTS))
        messages.append({"role": "user", "content": request(rng, kind, topic)})
        messages.append({"role": "assistant", "content": answer(rng, kind, topic_index)})
        if rng.random() < 0.15:
            messages.append({"role": "user", "content": _fill(rng, rng.choice(FOLLOW_UPS), topic)})
            messages.append({"role": "assistant", "content": answer(rng, "explain", topic_index)})
        yield messages


def request(rng: random.Random, kind: Kind, topic: Topic) -> str:
    """A user's message of one kind. Two in three name the topic; the others leave the model to choose one."""
    text = _fill(rng, rng.choice(REQUESTS[kind]), topic)
    if rng.random() < 0.1:  # long requests, too: pasted text above or below what is asked
        pasted = " ".join(_sentence(rng) for _ in range(rng.randint(2, 8)))
        text = f"{text}\n\n{pasted}" if rng.random() < 0.7 else f"{pasted}\n\n{text}"
    return text


def answer(rng: random.Random, kind: Kind, topic_index: int) -> str:
    """The assistant's message. Each topic has its own favourites among the sentences, so that answers differ."""

    topic = TOPICS[topic_index]
    fields = topic._asdict()

    def say(template: str) -> str:
        sentence = template.format_map(fields)
        return sentence[0].upper() + sentence[1:]

    def pick(choices: Sequence[str], number: int = 1) -> list[str]:
        return _favourites(rng, choices, topic_index, number)

    if kind == "code":
        program, remark = PROGRAMS[rng.choice((topic_index, rng.randrange(len(PROGRAMS)))) % len(PROGRAMS)]
        return f"{pick(CODE_OPENINGS)[0]}\n\n```python\n{program}\n```\n\n{remark}"
    if kind == "json":
        return json.dumps(_record(rng, topic))
    if kind == "summary":
        return " ".join(map(say, pick(SUMMARIES, 2)))
    if kind == "story":
        return " ".join(say(pick(sentences)[0]) for sentences in STORY)
    count = _favourites(rng, (2, 3, 4, 5) if kind == "explain" else (3, 4, 5, 6), topic_index, 1)[0]
    fields["count"] = NUMBERS[count - 2]
    if kind == "steps":
        steps = (f"{number}. {say(step)}" for number, step in enumerate(pick(STEPS, count), start=1))
        return "\n".join([say(pick(STEP_OPENINGS)[0]), *steps])
    points = []
    for ordinal, point in zip(ORDINALS, pick(POINTS, count), strict=False):
        points.append(f"{ordinal}, {point[0].lower()}{point[1:].format_map(fields)}")
    return " ".join([say(pick(OPENINGS)[0]), *points, say(pick(CLOSINGS)[0])])


def _favourites(rng: random.Random, choices: Sequence, topic_index: int, number: int) -> list:
    """Different choices in random order, where those just after the topic's own place come up most often."""
    start = topic_index % len(choices)
    remaining = [*choices[start:], *choices[:start]]
    chosen = []
    for _ in range(number):
        weights = [0.4**rank for rank in range(len(remaining))]
        chosen.append(remaining.pop(rng.choices(range(len(remaining)), weights)[0]))
    return chosen


def _record(rng: random.Random, topic: Topic) -> dict[str, object]:
    """A flat JSON object: mostly the topic's own fields, sometimes other keys, as a schema may ask for."""
    if rng.random() < 0.7:
        number = len(topic.noun) % 4 + 2
        names = ("person", "place", "tool", "material", "duration")[:number]
        return {name: getattr(topic, name) for name in names}
    values: list[Callable[[], object]] = [
        lambda: rng.choice(NAMES), lambda: topic.place, lambda: topic.person, lambda: rng.randint(1, 99),
        lambda: rng.random() < 0.5, lambda: [topic.tool, topic.material], lambda: topic.duration,
    ]  # fmt: skip
    return {rng.choice(COMMON): rng.choice(values)() for _ in range(rng.randint(1, 4))}


def _fill(rng: random.Random, template: str, topic: Topic) -> str:
    """Fills a request. Each slot is drawn anew, so a template may use one twice."""
    parts: dict[str, Callable[[], str]] = {
        "subject": lambda: rng.choice((topic.noun, *topic.keywords)) if rng.random() < 0.7 else _words(rng, 1, 3),
        "words": lambda: _words(rng, 1, 4),
        "sentence": lambda: _sentence(rng),
        "name": lambda: rng.choice(NAMES),
        "keys": lambda: ", ".join(_words(rng, 1, 1) for _ in range(rng.randint(2, 4))),
        "identifier": lambda: "_".join(rng.choices(COMMON, k=2)),
        "snippet": lambda: _snippet(rng),
    }
    pieces = []
    for literal, field, _, _ in Formatter().parse(template):
        pieces.append(literal)
        if field is not None:
            pieces.append(parts[field]())
    return "".join(pieces)


def _words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(_word(rng) for _ in range(rng.randint(least, most)))


def _word(rng: random.Random) -> str:
    sort = rng.random()
    if sort < 0.75:
        return rng.choice(COMMON)
    if sort < 0.92:  # words that the model has never seen and will never see again
        return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3)))
    if sort < 0.97:
        return rng.choice(NAMES)
    return str(rng.choice((rng.randrange(10), rng.randrange(100), rng.randrange(1000), rng.randrange(1990, 2030))))


def _sentence(rng: random.Random) -> str:
    words = [_word(rng) for _ in range(rng.randint(5, 16))]
    if len(words) > 8:
        words[len(words) // 2] += ","
    text = " ".join(words) + rng.choice((".", ".", ".", "?", "!"))
    return text[0].upper() + text[1:]


def _snippet(rng: random.Random) -> str:
    a, b, c = rng.sample(COMMON, 3)
    return rng.choice((
        f"def {a}({b}, {c}):\n    return {b} + {c}",
        f"for {a} in {b}:\n    print({a})",
        f"if {a} > {rng.randrange(100)}:\n    {b} = {c}[0]\nelse:\n    {b} = None",
        f"const {a} = ({b}) => {{ return {b} * {rng.randrange(10)}; }};",
        f"SELECT {a}, {b} FROM {c} WHERE {a} = '{b}';",
        f"class {a.title()}:\n    def __init__(self, {b}):\n        self.{b} = {b}",
    ))  # fmt: skip
