"""A hundred JSON schemas of the kinds that clients send, by name.

Records to extract, arguments of tools, events, settings, trees; with enums, lists, unions,
references, patterns, formats, numbers in ranges and names in many scripts. Texts are short, so that
most answers of a small model are whole.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

WORD: Schema = {"type": "string", "maxLength": 16}
LINE: Schema = {"type": "string", "maxLength": 40}
YES_NO: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 1000}
PRICE: Schema = {"type": "number", "minimum": 0, "maximum": 9999}
DAY: Schema = {"type": "string", "format": "date"}
MOMENT: Schema = {"type": "string", "format": "date-time"}
EMAIL: Schema = {"type": "string", "format": "email", "maxLength": 30}
UUID: Schema = {"type": "string", "format": "uuid"}


def record(optional: dict[str, Schema] | None = None, **properties: Schema) -> Schema:
    """Return a closed object; `properties` are required."""
    return {
        "type": "object",
        "properties": {**properties, **(optional or {})},
        "required": list(properties),
        "additionalProperties": False,
    }


def listed(items: Schema, least: int = 0, most: int = 3) -> Schema:
    """Return a list of `least` to `most` items."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def one_of(*values: Any) -> Schema:
    """Return an enum."""
    return {"enum": list(values)}


def either(*schemas: Schema) -> Schema:
    """Return a union."""
    return {"anyOf": list(schemas)}


def like(pattern: str) -> Schema:
    """Return a text with a pattern."""
    return {"type": "string", "pattern": pattern}


def ref(name: str) -> Schema:
    """Return a reference to a definition."""
    return {"$ref": f"#/$defs/{name}"}


def defined(schema: Schema, **definitions: Schema) -> Schema:
    """Return a schema with definitions."""
    return {**schema, "$defs": definitions}


def nullable(schema: Schema) -> Schema:
    """Return a schema that also allows null."""
    return either(schema, {"type": "null"})


ADDRESS = record(street=LINE, city=WORD, zip=like("^[0-9]{5}$"), country=one_of("DE", "FR", "US"))
MONEY = record(amount=PRICE, currency=one_of("EUR", "USD", "JPY"))
PERSON = record(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}, email=EMAIL)
LEAF_OR_TREE = defined(ref("node"), node=record(label=WORD, children=listed(ref("node"), most=2)))

RECORDS: dict[str, Schema] = {
    "person": PERSON,
    "person_with_address": record(name=WORD, address=ADDRESS),
    "people": listed(PERSON, 1, 2),
    "name_age_city": record(name=WORD, age=COUNT, city=one_of("Paris", "London", "Rome")),
    "invoice": record(
        number=like("^INV-[0-9]{4}$"),
        issued=DAY,
        total=MONEY,
        lines=listed(record(item=WORD, quantity=COUNT, price=PRICE), 1, 2),
    ),
    "receipt": record(shop=WORD, paid=MONEY, cash=YES_NO),
    "product": record(
        {"tags": listed(WORD)}, sku=like("^[A-Z]{3}-[0-9]{3}$"), title=LINE, price=PRICE
    ),
    "book": record(
        title=LINE, authors=listed(WORD, 1, 2), year=COUNT, isbn=like("^97[89][0-9]{10}$")
    ),
    "movie": record(
        title=LINE,
        year={"type": "integer", "minimum": 1900, "maximum": 2030},
        genre=one_of("drama", "comedy", "horror"),
        rating={"type": "number", "minimum": 0, "maximum": 10},
    ),
    "recipe": record(
        name=WORD,
        servings=COUNT,
        ingredients=listed(record(what=WORD, amount=PRICE, unit=one_of("g", "ml", "pc")), 1, 3),
    ),
    "resume": record(
        name=WORD,
        skills=listed(WORD, 1, 3),
        jobs=listed(record(company=WORD, since=DAY, until=nullable(DAY)), 0, 2),
    ),
    "contact_card": record({"phone": like(r"^\+[0-9]{6,12}$"), "email": EMAIL}, name=WORD),
    "flight": record(
        number=like("^[A-Z]{2}[0-9]{3,4}$"), departs=MOMENT, seat=like("^[0-9]{1,2}[A-F]$")
    ),
    "hotel_booking": record(
        guest=WORD,
        nights={"type": "integer", "minimum": 1, "maximum": 30},
        arrives=DAY,
        breakfast=YES_NO,
    ),
    "bank_transfer": record(iban=like("^DE[0-9]{20}$"), money=MONEY, reason=LINE),
    "patient": record(id=UUID, born=DAY, blood=one_of("A", "B", "AB", "0"), allergies=listed(WORD)),
    "lab_result": record(test=WORD, value={"type": "number"}, unit=WORD, is_normal=YES_NO),
    "car": record(
        make=WORD, plate=like("^[A-Z]{1,3}-[A-Z]{2} [0-9]{1,4}$"), doors=one_of(2, 3, 4, 5)
    ),
    "real_estate": record({"garden": YES_NO}, rooms=COUNT, area=PRICE, address=ADDRESS),
    "sports_match": record(home=WORD, away=WORD, goals=listed(COUNT, 2, 2)),
    "weather": record(
        city=WORD,
        temperature={"type": "number", "minimum": -50, "maximum": 50},
        sky=one_of("clear", "cloudy", "rain"),
    ),
    "stock": record(symbol=like("^[A-Z]{1,5}$"), open=PRICE, close=PRICE, volume=COUNT),
    "country": record(
        name=WORD, code=like("^[A-Z]{2}$"), population=COUNT, languages=listed(WORD, 1, 2)
    ),
    "song": record(title=LINE, artist=WORD, seconds=COUNT, is_explicit=YES_NO),
    "course": record(
        title=LINE, credits=one_of(1, 2, 3, 5, 10), days=listed(one_of("Mon", "Tue", "Wed"), 1, 3)
    ),
}

TOOLS: dict[str, Schema] = {
    "get_weather": record({"unit": one_of("celsius", "fahrenheit")}, location=WORD),
    "search": record({"limit": {"type": "integer", "minimum": 1, "maximum": 50}}, query=LINE),
    "send_email": record({"cc": listed(EMAIL, most=2)}, to=EMAIL, subject=LINE, body=LINE),
    "create_event": record(
        {"guests": listed(EMAIL, most=2)}, title=LINE, starts=MOMENT, minutes=COUNT
    ),
    "run_sql": record(
        table=like("^[a-z_]{1,12}$"), columns=listed(like("^[a-z_]{1,10}$"), 1, 3), limit=COUNT
    ),
    "calculator": record(
        operation=one_of("add", "subtract", "multiply", "divide"),
        a={"type": "number"},
        b={"type": "number"},
    ),
    "set_timer": record(seconds={"type": "integer", "minimum": 1, "maximum": 3600}),
    "translate": record(
        text=LINE, source=one_of("en", "de", "fr"), target=one_of("en", "de", "fr")
    ),
    "move_file": record(
        {"overwrite": YES_NO}, source=like("^/[a-z/]{1,20}$"), target=like("^/[a-z/]{1,20}$")
    ),
    "http_request": record(
        {"headers": {"type": "object", "additionalProperties": WORD, "maxProperties": 2}},
        method=one_of("GET", "POST", "DELETE"),
        path=like("^/[a-z]{1,12}$"),
    ),
    "book_table": record(
        people={"type": "integer", "minimum": 1, "maximum": 12},
        at={"type": "string", "format": "time"},
        name=WORD,
    ),
    "play_music": either(record(song=WORD), record(playlist=WORD, shuffle=YES_NO)),
    "tool_call": either(
        record(name={"const": "search"}, arguments=record(query=LINE)),
        record(name={"const": "stop"}, arguments=record()),
    ),
    "tool_calls": listed(record(name=one_of("get", "put"), arguments=record(key=WORD)), 1, 2),
    "next_action": record(
        thought=LINE, action=one_of("look", "walk", "wait"), argument=nullable(WORD)
    ),
    "vote": record(choice=one_of("yes", "no", "abstain"), reason=LINE),
    "grade": record(score={"type": "integer", "minimum": 1, "maximum": 5}, feedback=LINE),
    "rgb": listed({"type": "integer", "minimum": 0, "maximum": 255}, 3, 3),
    "route": record(start=listed({"type": "number"}, 2, 2), mode=one_of("car", "bike", "walk")),
    "resize": record(
        width={"type": "integer", "multipleOf": 16, "minimum": 16, "maximum": 1024},
        keep_ratio=YES_NO,
    ),
}

TEXTS: dict[str, Schema] = {
    "sentiment": record(
        sentiment=one_of("positive", "neutral", "negative"),
        confidence={"type": "number", "minimum": 0, "maximum": 1},
    ),
    "label": one_of("spam", "ham"),
    "labels": listed(one_of("politics", "sports", "science", "arts"), 1, 3),
    "entities": listed(record(text=WORD, kind=one_of("person", "place", "date")), 0, 3),
    "summary": record(title=LINE, points=listed(LINE, 1, 3)),
    "question_answer": record(question=LINE, answer=LINE, sources=listed(COUNT, most=2)),
    "quiz": record(question=LINE, options=listed(WORD, 4, 4), correct=one_of(0, 1, 2, 3)),
    "chain_of_thought": record(
        steps=listed(record(explanation=LINE, output=WORD), 1, 2), answer=WORD
    ),
    "judge": record(
        better=one_of("A", "B"), margin={"type": "integer", "minimum": 0, "maximum": 3}
    ),
    "keywords": listed(like("^[a-z]{3,10}$"), 2, 4),
    "translation": record(en=LINE, de=LINE),
    "dialogue": listed(record(speaker=one_of("Anna", "Ben"), text=LINE), 1, 3),
    "moderation": record(
        flagged=YES_NO, categories=record(hate=YES_NO, violence=YES_NO, spam=YES_NO)
    ),
    "plain_text": LINE,
    "any_number": {"type": "number", "minimum": -1000, "maximum": 1000},
    "yes_no_null": {"type": ["boolean", "null"]},
}

SYSTEMS: dict[str, Schema] = {
    "log_entry": record(
        {"stack": listed(LINE, most=2)},
        at=MOMENT,
        level=one_of("debug", "info", "warning", "error"),
        message=LINE,
    ),
    "issue": record(
        title=LINE, state=one_of("open", "closed"), labels=listed(WORD), assignee=nullable(WORD)
    ),
    "commit": record(
        sha=like("^[0-9a-f]{12}$"), author=PERSON, files=listed(like("^[a-z]{1,8}\\.py$"), 1, 3)
    ),
    "semver": like("^(0|[1-9][0-9]?)\\.(0|[1-9][0-9]?)\\.(0|[1-9][0-9]?)$"),
    "package": record(
        {"license": one_of("MIT", "Apache-2.0")},
        name=like("^[a-z-]{2,12}$"),
        version=like("^[0-9]\\.[0-9]\\.[0-9]$"),
    ),
    "server": record(
        host={"type": "string", "format": "ipv4"},
        port={"type": "integer", "minimum": 1, "maximum": 65535},
        tls=YES_NO,
    ),
    "feature_flags": {
        "type": "object",
        "patternProperties": {"^is_[a-z]{2,6}$": YES_NO},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "settings": {
        "type": "object",
        "properties": {"theme": one_of("dark", "light"), "size": COUNT},
        "additionalProperties": False,
    },
    "metrics": {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": 0, "maximum": 99},
        "minProperties": 1,
        "maxProperties": 2,
    },
    "cron": like("^([0-9]|[1-5][0-9]) ([0-9]|1[0-9]|2[0-3]) \\* \\* [0-6]$"),
    "color": like("^#[0-9a-f]{6}$"),
    "mac": like("^([0-9a-f]{2}:){5}[0-9a-f]{2}$"),
    "query_filter": defined(
        ref("filter"),
        filter=either(
            record(
                field=one_of("age", "name"), op=one_of("<", "=", ">"), value=either(COUNT, WORD)
            ),
            record(all=listed(ref("filter"), 1, 2)),
        ),
    ),
    "pipeline": record(
        stages=listed(
            record({"needs": listed(WORD, most=1)}, name=WORD, script=listed(LINE, 1, 2)), 1, 2
        )
    ),
    "permission": record(user=UUID, role=one_of("reader", "writer", "owner"), until=nullable(DAY)),
    "webhook": record(
        event=one_of("push", "merge"),
        payload=either(record(branch=WORD), record(id=COUNT, merged=YES_NO)),
    ),
    "geo_json": record(
        type={"const": "Point"},
        coordinates=listed({"type": "number", "minimum": -180, "maximum": 180}, 2, 2),
    ),
    "json_rpc": record(
        jsonrpc={"const": "2.0"},
        id=COUNT,
        method=WORD,
        params=listed(either(COUNT, WORD, YES_NO), 0, 2),
    ),
    "error": record(
        code=one_of(400, 404, 500),
        message=LINE,
        retry_after={"type": ["integer", "null"], "minimum": 0, "maximum": 60},
    ),
    "duration": record(span={"type": "string", "format": "duration"}),
}

SHAPES: dict[str, Schema] = {
    "tree": LEAF_OR_TREE,
    "linked_list": defined(ref("cell"), cell=record(value=COUNT, next=nullable(ref("cell")))),
    "menu": defined(
        record(items=listed(ref("item"), 1, 2)),
        item=record({"items": listed(ref("item"), most=1)}, label=WORD),
    ),
    "expression": defined(
        ref("e"), e=either(COUNT, record(op=one_of("+", "*"), left=COUNT, right=ref("e")))
    ),
    "two_definitions": defined(
        record(home=ref("place"), cost=ref("money")), place=ADDRESS, money=MONEY
    ),
    "matrix": listed(listed({"type": "integer", "minimum": -9, "maximum": 9}, 2, 2), 2, 2),
    "tuple": {"type": "array", "prefixItems": [WORD, COUNT, YES_NO], "items": False, "minItems": 3},
    "deep": record(a=record(b=record(c=record(d=record(e=record(f=WORD)))))),
    "shape": {
        "oneOf": [
            record(kind={"const": "circle"}, radius=PRICE),
            record(kind={"const": "box"}, width=PRICE, height=PRICE),
        ]
    },
    "all_of": {
        "allOf": [
            {"type": "object", "properties": {"id": COUNT}, "required": ["id"]},
            {
                "type": "object",
                "properties": {"name": WORD},
                "required": ["name"],
                "maxProperties": 2,
            },
        ]
    },
    "many_types": {
        "type": ["string", "integer", "boolean", "null"],
        "maxLength": 10,
        "minimum": 0,
        "maximum": 99,
    },
    "constants": record(
        version={"const": 1}, kind={"const": "report"}, done={"const": True}, none={"const": None}
    ),
    "umlauts": record(größe=COUNT, straße=WORD, süß=one_of("ja", "nein", "vielleicht, später")),
    "japanese": record(名前=WORD, 天気=one_of("晴れ", "雨", "雪")),
    "emoji": record(mood=one_of("😀", "😢", "🤷"), **{"🔑": WORD}),
    "arabic": record(اسم=WORD, لون=one_of("أحمر", "أزرق")),
    "odd_names": record(**{"a b": YES_NO, 'c"d': YES_NO, "e\\f": COUNT, "g/h": WORD, "": COUNT}),
    "cyrillic_pattern": record(имя=like("^[а-я]{3,8}$")),
    "wide": record(**{f"field_{number}": YES_NO for number in range(20)}),
}

SCHEMAS: dict[str, Schema] = {**RECORDS, **TOOLS, **TEXTS, **SYSTEMS, **SHAPES}
