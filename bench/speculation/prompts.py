"""The prompts of `bench.speculation`: conversation, summaries, small edits of code."""

from __future__ import annotations

CHAT = (
    "What is a good way to start learning to play the guitar as an adult?",
    "Explain to a ten-year-old why the sky is blue.",
    "I have two free days in Lisbon. What should I do?",
    "Give me five tips for sleeping better before an important exam.",
    "What is the difference between a lake and a pond?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "How does a refrigerator keep food cold?",
    "My neighbour plays loud music at night. How can I talk to them about it?",
)

_ARTICLES = (
    """The town of Harlow Bay reopened its old tram line on Saturday, forty years after the last
carriage left the harbour. The line runs for six kilometres, from the fish market to the botanical
garden, and stops at eleven places on the way. The council paid for the new rails with a loan that
will be returned over twenty years, while the carriages were restored by a club of volunteers who
met every Thursday evening in a shed behind the station. On the first day more than nine thousand
people took a ride, and some of them waited for two hours. The mayor said that the line should take
about a third of the cars out of the centre. Shop owners near the harbour are less sure, because
the rails took the place of eighty parking spaces. Tickets cost two crowns for adults, children
under twelve ride for free, and the trams run every fifteen minutes until ten in the evening.""",
    """Researchers at the Institute for Soil Science have followed earthworms in forty fields for
nine years. Half of the fields were ploughed every autumn, and the other half were left alone and
sown directly. In the fields that were left alone the number of earthworms tripled, and the soil
could hold a quarter more water after heavy rain. The harvest was smaller in the first three years,
by about a tenth, and equal to that of the ploughed fields after the sixth year. The researchers
think that farmers need help in those first years, because the gain comes late and the loss comes
early. They also found that the kind of crop mattered little, while the depth of the plough
mattered a lot: ploughing to ten centimetres did far less harm than ploughing to thirty.""",
    """The central library will close for seven months from the first of March. The roof, which
was built in 1931, lets in water in eleven places, and the heating fails several times each winter.
During the works the reading room moves to the former post office in Mill Street, where there is
space for sixty readers. About forty thousand books move with it, chosen by how often they were
borrowed in the last two years. All other books can be ordered and arrive within three working
days. The children's section stays open in the east wing, which has its own entrance and its own
heating. The library expects costs of four million, of which the region pays half. When the library
opens again in October, it will have a cafe, a lift to all floors, and longer opening hours on
Sundays.""",
    """A small company from the north of the country has built a boat that cleans rivers. The boat
is nine metres long and carries a belt of steel mesh that lifts bottles, bags and branches out of
the water. It is driven by an electric motor, and panels on the roof charge the battery while the
boat works. In a trial of three months on the river Tarn it collected eighteen tonnes of waste, of
which a third could be recycled. Two people are enough to run it. The company wants to sell forty
boats in the next two years, at a price of ninety thousand each. Environmental groups welcome the
boat but say that it would be better if the waste did not reach the river in the first place. The
company agrees, and says that the boat also counts what it collects, so that towns can see where
the waste comes from.""",
    """The bakery on Castle Square has baked bread for a hundred and twelve years, and since last
week it bakes it at night only. Electricity is cheaper between midnight and five in the morning,
and the ovens use as much of it as thirty households. The owner, Marta Lindqvist, says that the
change saves her about eleven hundred a month, which is the wage of an apprentice for three weeks.
Her six employees voted for the change after a trial in the spring. Two of them like the quiet
hours, and one has moved to the shop because he has small children. The bread is ready at six, as
it was before, and customers noticed no difference. Other bakeries in the town have asked her how
it went, and one of them begins next month.""",
    """The regional hospital has begun to send its patients letters in plain language. A group of
nurses, doctors and former patients rewrote the forty letters that are used most. Long sentences
were cut, foreign words were explained or left out, and each letter now begins with what the
patient has to do. Before the change one patient in five called the hospital to ask what a letter
meant. In the first three months with the new letters it was one in fourteen. The hospital also
counted missed appointments, and they fell by a third. The rewriting took a year and cost very
little, because most of the work was done in normal hours. The group now turns to the leaflets that
come with medicines, which it finds much harder, since the law says what has to be in them.""",
    """A school in the valley of Orsa has given each class a garden bed. The pupils decide
in February what to sow, keep a diary of the weather, and sell what they harvest at a stall in front
of the gate. Last year the stall earned six hundred, and the pupils spent the money on a greenhouse
that stands behind the gym. The teachers use the beds in nearly all subjects: in mathematics the
children measure how fast beans grow, and in history they learn which plants came from which
continent. Two parents with a farm lend the tools and come by on Fridays. Not all of it went well.
Snails ate the lettuce of the third class twice, and during the summer holidays nobody felt
responsible for the watering. This year there is a list on which families enter the weeks in which
they are at home.""",
    """The bus company of the county tests timetables without times. On four lines in the south
buses now come when somebody has ordered one, by telephone or at a button on the stop. A computer in
the depot puts the orders together and tells the driver which way to take. On average passengers
wait for eleven minutes, while the old timetable had one bus every hour. The buses are smaller, with
sixteen seats, and drive a fifth fewer kilometres than before, because they no longer run empty in
the evening. Older people were sceptical at first, but after a visit of the company to the weekly
market most of them tried it. The test ends in November. If at least three hundred people a day use
the lines by then, the county will do the same in the east.""",
)

_CODE = (
    (
        "Rename the variable `total` to `balance`.",
        """class Account:
    def __init__(self, owner):
        self.owner = owner
        self.total = 0
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.total += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.total:
            raise ValueError("not enough money")
        self.total -= amount
        self.history.append(("withdraw", amount))""",
    ),
    (
        "Add a method `is_empty` to the class.",
        """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if len(self.items) == 0:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if len(self.items) == 0:
            raise IndexError("peek at an empty stack")
        return self.items[-1]

    def size(self):
        return len(self.items)""",
    ),
    (
        "Change the default port to 9090 and add a docstring to each function.",
        """import json
import socket

def connect(host="localhost", port=8080, timeout=5.0):
    connection = socket.create_connection((host, port), timeout)
    connection.settimeout(timeout)
    return connection

def send_message(connection, message):
    data = json.dumps(message).encode("utf-8")
    length = len(data).to_bytes(4, "big")
    connection.sendall(length + data)

def receive_message(connection):
    length = int.from_bytes(connection.recv(4), "big")
    data = b""
    while len(data) < length:
        data += connection.recv(length - len(data))
    return json.loads(data.decode("utf-8"))""",
    ),
    (
        "Make the function `median` raise a ValueError when the list is empty.",
        """def mean(values):
    return sum(values) / len(values)

def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

def variance(values):
    average = mean(values)
    return sum((value - average) ** 2 for value in values) / len(values)

def standard_deviation(values):
    return variance(values) ** 0.5""",
    ),
    (
        "Replace the print calls by calls of `logger.info`.",
        """import os
import shutil

def back_up(source, target):
    print("start of the backup")
    if not os.path.exists(target):
        print("creating the folder " + target)
        os.makedirs(target)
    for name in sorted(os.listdir(source)):
        path = os.path.join(source, name)
        if os.path.isfile(path):
            print("copying the file " + name)
            shutil.copy2(path, os.path.join(target, name))
        else:
            print("skipping the folder " + name)
    print("end of the backup")""",
    ),
    (
        "Add a function `multiply` that works like the others.",
        '''def add(a, b):
    """Return the sum of two numbers."""
    if not isinstance(a, (int, float)):
        raise TypeError("a must be a number")
    if not isinstance(b, (int, float)):
        raise TypeError("b must be a number")
    return a + b

def subtract(a, b):
    """Return the difference of two numbers."""
    if not isinstance(a, (int, float)):
        raise TypeError("a must be a number")
    if not isinstance(b, (int, float)):
        raise TypeError("b must be a number")
    return a - b''',
    ),
    (
        "Rename the class to `Thermostat`.",
        """class Heater:
    def __init__(self, lowest, highest):
        self.lowest = lowest
        self.highest = highest
        self.is_on = False

    def update(self, temperature):
        if temperature < self.lowest:
            self.is_on = True
        elif temperature > self.highest:
            self.is_on = False
        return self.is_on

    def set_range(self, lowest, highest):
        if lowest >= highest:
            raise ValueError("lowest must be below highest")
        self.lowest = lowest
        self.highest = highest""",
    ),
    (
        "Let `read_rows` skip empty lines.",
        """import csv

def read_rows(path):
    rows = []
    with open(path, newline="") as file:
        reader = csv.reader(file)
        for row in reader:
            rows.append(row)
    return rows

def write_rows(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        for row in rows:
            writer.writerow(row)

def column(rows, index):
    values = []
    for row in rows:
        values.append(row[index])
    return values""",
    ),
)

SUMMARISE = tuple(f"{article}\n\nSummarise this article." for article in _ARTICLES)
CODE = tuple(
    f"Here is a Python program:\n\n```python\n{code}\n```\n\n{edit} Repeat the whole program."
    for edit, code in _CODE
)

PROMPTS: dict[str, tuple[str, ...]] = {"chat": CHAT, "summarise": SUMMARISE, "code": CODE}
