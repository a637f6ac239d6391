"""Prompts to distil from: a bank of short questions and instructions, and follow-ups to answers."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from tools.mtp_training.everyday_messages import GAPS, MESSAGES

_FILLINGS = 12
"""The most different fillings of one message's gaps."""
_FORMS_PER_SUBJECT = 10

Message = dict[str, str]

_SUBJECTS = (
    "photosynthesis", "the water cycle", "black holes", "volcanoes", "vaccines", "inflation",
    "the stock market", "supply and demand", "the French Revolution", "the Roman Empire",
    "the Silk Road", "the printing press", "the Industrial Revolution", "the moon landing",
    "plate tectonics", "gravity", "electricity", "magnets", "the human heart", "sleep",
    "dreams", "memory", "the immune system", "DNA", "evolution", "dinosaurs", "honey bees",
    "whales", "migrating birds", "coral reefs", "rainforests", "deserts", "glaciers",
    "hurricanes", "earthquakes", "recycling", "solar power", "wind turbines", "batteries",
    "electric cars", "trains", "bicycles", "airplanes", "bridges", "the internet", "computers",
    "machine learning", "encryption", "passwords", "video games", "chess", "football", "yoga",
    "running", "healthy eating", "coffee", "chocolate", "bread baking", "gardening", "pasta",
    "public speaking", "job interviews", "time management", "saving money", "learning a language",
    "photography", "jazz music", "the piano", "poetry", "painting", "museums", "libraries",
    "democracy", "human rights", "the United Nations", "climate change", "fractions",
    "prime numbers", "the Pythagorean theorem", "probability", "algebra", "statistics",
)  # fmt: skip
_FORMS = (
    "What is {}?", "What are the main ideas behind {}?", "How does it work: {}?",
    "Tell me about {}.", "Why does {} matter?", "Give me three facts about {}.",
    "Write a short paragraph about {}.", "Write a short story that involves {}.",
    "Write a poem about {}.", "List five questions a student might ask about {}.",
    "Describe {} to a ten-year-old.", "What is the history of {}?",
    "What are the benefits and drawbacks of {}?", "Give me some tips about {}.",
    "Write a tweet about {}.", "What should a beginner know about {}?",
    "Compare {} with something similar.", "Write an introduction for an essay on {}.",
    "What are common misconceptions about {}?", "Can you explain {} step by step?",
    "Make a short quiz about {} with answers.", "Write a dialogue between two friends about {}.",
    "In one sentence, what is {}?", "Give an example from everyday life that has to do with {}.",
    "Who are important people connected with {}?", "Create an outline for a talk about {}.",
)  # fmt: skip
_CODE_TASKS = (
    "reverses a string", "checks whether a number is prime", "sorts a list of numbers",
    "counts the words in a text", "finds the largest value in a list", "computes a factorial",
    "prints the Fibonacci numbers", "removes duplicates from a list", "reads a CSV file",
    "converts Celsius to Fahrenheit", "checks for a palindrome", "merges two dictionaries",
    "finds the average of a list", "counts vowels in a string", "generates a random password",
    "computes the greatest common divisor", "flattens a nested list", "transposes a matrix",
    "validates an email address", "finds common elements of two lists", "rolls two dice",
    "adds up the digits of a number", "searches a sorted list", "writes a list to a file",
    "groups words by their first letter", "measures how long a function takes",
)  # fmt: skip
_CODE_FORMS = (
    "Write a Python function that {}.", "Show me JavaScript code that {}.",
    "Write a function that {} and explain how it works.", "How do I write a program that {}?",
    "Write a Python class with a method that {}.", "Write unit tests for a function that {}.",
)  # fmt: skip
_SINGLES = (
    "Hi!", "Hello, how are you?", "Who are you?", "What can you do?", "Thank you for your help.",
    "Tell me a joke.", "I feel sad today. What can I do?", "Recommend a good book.",
    "What is the capital of France?", "What is the capital of Australia?", "What is 12 times 9?",
    "What is 15 percent of 240?", "How many days are in a leap year?", "Solve 3x + 5 = 20.",
    "A train travels 120 km in 2 hours. What is its speed?", "Convert 5 miles to kilometers.",
    "Translate 'good morning' into Spanish.", "Translate 'where is the station' into French.",
    "What is the past tense of 'to swim'?", "Give me synonyms of 'happy'.",
    "Write an email asking my boss for a day off.", "Write a thank-you note to a teacher.",
    "Write an apology to a customer whose parcel was late.", "Plan a weekend trip to Rome.",
    "Plan a healthy menu for three days.", "Give me a recipe for pancakes.",
    "How do I make tomato soup?", "How do I tie a tie?", "How can I remove a coffee stain?",
    "How do I change a flat tire?", "What should I pack for a week of camping?",
    "Name ten animals that live in Africa.", "List the planets of the solar system.",
    "List three countries in South America.", "Suggest names for a black cat.",
    "Write a product description for a water bottle.", "Write a slogan for a bakery.",
    "Write a birthday message for my sister.", "Write a cover letter for a software engineer.",
    "What is the difference between a list and a tuple in Python?", "What does HTTP stand for?",
    "Explain recursion.", "What is a database index?", "What does the SQL JOIN clause do?",
    "Write a SQL query that counts the customers of each city.", "Write an HTML page with a form.",
    "Write a bash script that renames all files in a folder.", "What is a regular expression?",
    "How do I undo the last git commit?", "What is the meaning of life?",
)  # fmt: skip
OPENINGS = (
    "", "", "", "", "What", "How do", "How can", "Why", "Write a", "Give me", "Can you", "I need",
    "Explain", "Create a", "Tell me", "Which", "Is it", "I want to", "List", "Describe",
    "Help me", "Please", "Design", "Suggest", "Imagine", "In Python,", "My", "Hey", "Compare",
)  # fmt: skip
"""First words of a message that the model writes itself; an empty one leaves it free."""

_FOLLOW_UPS = (
    "Summarize this text: {}",
    "Summarize the following in one sentence.\n\n{}",
    "Rewrite this in simpler words: {}",
    "Rewrite the following text so that it sounds more friendly.\n\n{}",
    "Continue this text: {}",
    "Fix the mistakes in this text: {}",
    "List the key points of this text.\n\n{}",
    "What is the main idea of the following passage?\n\n{}",
    "Ask me three questions about this text: {}",
    "Write a title for the following text: {}",
)
_CODE_FOLLOW_UPS = (
    "Explain what this does: {}",
    "Add comments to this code.\n\n{}",
    "Rename the variables in this code and show it again.\n\n{}",
    "Find a bug in this code: {}",
)
_NEXT_TURNS = (
    "Can you make that shorter?",
    "Tell me more.",
    "Please give me an example.",
    "Why is that?",
    "Write that again as a list.",
    "Thanks! What else should I know?",
    "Can you say that in simpler words?",
    "How do I start?",
    "Are you sure about that?",
    "Which of these is the most important?",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that the model is to answer. `key` names it in the work folder's files."""

    key: str
    messages: tuple[Message, ...]


def bank(seed: int) -> list[Prompt]:
    """Return single messages, then everyday messages and subjects in some forms, in turns."""
    draw = random.Random(seed)  # noqa: S311 (which prompts come first is no secret)
    everyday = list(dict.fromkeys(_filled(m, draw) for _ in range(_FILLINGS) for m in MESSAGES))
    pairings = [f.format(s) for s in _SUBJECTS for f in draw.sample(_FORMS, _FORMS_PER_SUBJECT)]
    pairings += [form.format(task) for form in _CODE_FORMS for task in _CODE_TASKS]
    draw.shuffle(everyday)
    draw.shuffle(pairings)
    prompts = [[_single(text) for text in texts] for texts in (_SINGLES, everyday, pairings)]
    return [*prompts[0], *interleave(prompts[1], prompts[2])]


def _single(text: str) -> Prompt:
    return Prompt(f"bank-{zlib.crc32(text.encode()):08x}", (_user(text),))


def _filled(message: str, draw: random.Random) -> str:
    """Fill all gaps of a message, those of one kind differently."""
    gaps = sorted(set(re.findall(r"{(\w+)}", message)))
    kinds = [gap.split("_")[0] for gap in gaps]
    left = {kind: draw.sample(GAPS[kind], kinds.count(kind)) for kind in kinds}
    text = message.format(**{g: left[k].pop() for g, k in zip(gaps, kinds, strict=True)})
    return text[0].upper() + text[1:] if message.startswith("{") else text


def self_written(texts: Sequence[str]) -> list[Prompt]:
    """Return prompts from messages that the model wrote itself."""
    return [Prompt(f"own-{i}", (_user(text),)) for i, text in enumerate(texts)]


def follow_up(prompt: Prompt, answer: str, seed: int) -> Prompt | None:
    """Return a prompt made from an answer, about its text or as the next turn; for 2 of 5."""
    draw = random.Random(f"{seed} {prompt.key}")  # noqa: S311 (a choice, not a secret)
    chance, text = draw.random(), answer.strip()
    if chance >= 0.4 or len(text) < 80:
        return None
    if chance < 0.1:
        said = {"role": "assistant", "content": text}
        turns = (*prompt.messages, said, _user(draw.choice(_NEXT_TURNS)))
        return Prompt(f"{prompt.key}+turn", turns)
    forms = _CODE_FOLLOW_UPS if "```" in text else _FOLLOW_UPS
    return Prompt(f"{prompt.key}+text", (_user(draw.choice(forms).format(text)),))


def interleave(first: Sequence[Prompt], second: Sequence[Prompt]) -> list[Prompt]:
    """Take from both in turns, so that every beginning is a mixture."""
    shared = min(len(first), len(second))
    mixed = [p for pair in zip(first[:shared], second[:shared], strict=True) for p in pair]
    return [*mixed, *first[shared:], *second[shared:]]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
