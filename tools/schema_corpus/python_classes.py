"""Print the JSON schemas that pydantic and libraries of agents make of classes and functions. See `make.py`.

The classes are written as their users write them, old ways among them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import enum
import importlib
import inspect
import json
import pkgutil
import random
import uuid
from typing import Annotated, Any, Literal

import agents
import mcp_types
import openai.types
from langchain_core.utils.function_calling import convert_to_openai_tool
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, TypeAdapter, conint, conlist, constr
from typing_extensions import TypedDict


def write(source: str, name: str, schema: Any) -> None:
    print(json.dumps({"source": source, "name": name, "schema": schema}))


class Unit(str, enum.Enum):  # noqa: UP042
    metre = "m"
    foot = "ft"
    inch = '"'


class Priority(enum.IntEnum):
    low = 1
    high = 2


class Address(BaseModel):
    street: str
    number: int = Field(ge=1)
    town: str = Field(min_length=1, max_length=60)
    post_code: str = Field(pattern=r"^[0-9]{5}$")
    country: Literal["ES", "FR", "DE"] = "ES"


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    born: datetime.date
    address: Address | None = None
    emails: list[str] = []
    height: float | None = Field(None, gt=0, lt=3)


class Team(BaseModel):
    name: constr(min_length=2, max_length=30)
    members: conlist(Person, min_length=1, max_length=20)
    lead: Person
    scores: dict[str, float]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: conint(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    barks: bool
    size: Unit


class Household(BaseModel):
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]
    any_pet: Cat | Dog


class Node(BaseModel):
    value: int
    left: Node | None = None
    right: Node | None = None


class Folder(BaseModel):
    name: str
    files: list[str] = []
    folders: list[Folder] = []


class Invoice(BaseModel):
    number: uuid.UUID
    issued: datetime.datetime
    due: datetime.date
    total: decimal.Decimal
    lines: list[tuple[str, int, decimal.Decimal]]
    paid: bool = False
    priority: Priority = Priority.low
    notes: str | None = None


class Extraction(BaseModel):
    class Entity(BaseModel):
        text: str
        label: Literal["person", "place", "organisation"]
        start: int = Field(ge=0)
        end: int = Field(ge=0)

    entities: list[Entity]
    language: str = Field(pattern="^[a-z]{2}$")
    confidence: float = Field(ge=0, le=1)


class Settings(BaseModel):
    model_config = ConfigDict(extra="allow")
    host: str = "localhost"
    port: int = Field(8080, ge=1, le=65535)
    tags: set[str] = set()
    limits: dict[Unit, int] = {}
    timeout: datetime.timedelta = datetime.timedelta(seconds=1)
    level: Literal["debug", "info", 3, None] = "info"


class Step(BaseModel):
    explanation: str
    output: str


class MathReasoning(BaseModel):
    steps: list[Step]
    final_answer: str


class Recipe(BaseModel):
    title: str = Field(max_length=80)
    minutes: int = Field(multiple_of=5, gt=0)
    ingredients: list[tuple[float, Unit, str]] = Field(min_length=1)
    steps: list[str] = Field(min_length=1, max_length=30)
    rating: float = Field(multiple_of=0.5, ge=0, le=5)


class Alias(BaseModel):
    first: str = Field(alias="firstName")
    last: str = Field(alias="last-name")
    web: str = Field(alias="@id")


class Matrix(BaseModel):
    rows: list[list[float]]
    shape: tuple[int, int]
    names: tuple[str, ...] = ()


class Base64(BaseModel):
    data: bytes
    kind: Annotated[str, Field(pattern=r"^(image|audio)/[a-z0-9.+-]+$")]


class Movie(TypedDict, total=False):
    title: str
    year: int
    genres: list[Literal["drama", "comedy", "horror"]]


@dataclasses.dataclass
class Point:
    x: float
    y: float
    label: str | None = None


classes = [Address, Person, Team, Household, Node, Folder, Invoice, Extraction, Settings, MathReasoning, Recipe, Alias,
           Matrix, Base64]  # fmt: skip
for cls in classes:
    write("pydantic", cls.__name__, cls.model_json_schema())
    write("pydantic", f"{cls.__name__} serialized", cls.model_json_schema(mode="serialization"))
    with contextlib.suppress(TypeError):  # it has no form for open objects
        write("openai", f"{cls.__name__} strict", to_strict_json_schema(cls))
for form in (Movie, Point, list[Person], dict[str, Point], Cat | Dog, Unit, Priority, int | None, tuple[int, str],
             list[Movie], dict[int, bool], frozenset[str], Literal["a", 1, True, None], HttpUrl):  # fmt: skip
    write("pydantic", f"TypeAdapter {form}", TypeAdapter(form).json_schema())


def of_modules(package: Any, limit: int) -> list[type[BaseModel]]:
    """Return a sample of the classes of a package."""
    found = dict[str, type[BaseModel]]()
    for module in [
        package.__name__,
        *(m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")),
    ]:
        try:
            members = vars(importlib.import_module(module))
        except Exception:  # what it needs is not installed
            continue
        for cls in members.values():
            is_model = inspect.isclass(cls) and issubclass(cls, BaseModel) and cls is not BaseModel
            if is_model and cls.__module__.startswith(package.__name__) and cls.model_fields:
                found[f"{cls.__module__}.{cls.__qualname__}"] = cls
    return [found[name] for name in random.Random(0).sample(sorted(found), min(limit, len(found)))]


import langchain_community.tools  # noqa: E402

for package, source, limit in ((openai.types, "openai", 45), (mcp_types, "mcp-types", 25)):
    for cls in of_modules(package, limit):
        write(source, f"{cls.__module__}.{cls.__qualname__}", cls.model_json_schema())
for cls in of_modules(langchain_community.tools, 400):
    if cls.__name__.endswith(("Input", "Schema", "Args", "Arguments")):
        try:
            write("langchain", cls.__name__, convert_to_openai_tool(cls)["function"]["parameters"])
        except Exception:  # fields that JSON has no form for
            continue


def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """Get the weather.

    Args:
        city: Where.
        unit: In what.
    """


def book_flight(origin: str, to: str, date: datetime.date, passengers: int = 1, bags: list[int] | None = None) -> str:
    """Book a flight."""


def send_mail(to: list[str], subject: str, body: str, attachments: dict[str, str] | None = None) -> bool:
    """Send a mail."""


def run_query(sql: str, parameters: list[str | int | float | None] = [], limit: int | None = None) -> str:  # noqa: B006
    """Run a query."""


def add_person(person: Person, notify: bool = False) -> str:
    """Add a person."""


def move(points: list[Point], by: tuple[float, float]) -> str:
    """Move points."""


def search(query: str, filters: Movie, top_k: Annotated[int, Field(ge=1, le=50)] = 5) -> str:
    """Search."""


def write_file(path: str, text: str, mode: Literal["w", "a"] = "w", permissions: int = 0o644) -> None:
    """Write a file."""


def nothing() -> str:
    """Take nothing."""


def convert(amount: float, from_unit: Unit, to_unit: Unit) -> float:
    """Convert."""


for function in (
    get_weather,
    book_flight,
    send_mail,
    run_query,
    add_person,
    move,
    search,
    write_file,
    nothing,
    convert,
):
    for is_strict in (True, False):
        try:
            tool = agents.function_tool(function, strict_mode=is_strict)
        except Exception:  # strict ones have no open objects
            continue
        write("openai-agents", f"{function.__name__} strict={is_strict}", tool.params_json_schema)
    write("langchain", function.__name__, convert_to_openai_tool(function)["function"]["parameters"])

from smolagents import default_tools  # noqa: E402
from smolagents.models import get_tool_json_schema  # noqa: E402

for name, tool in default_tools.TOOL_MAPPING.items():
    try:
        write("smolagents", name, get_tool_json_schema(tool())["function"]["parameters"])
    except Exception:  # what it needs is not installed
        continue
