"""Pictures of coloured shapes, and what can be asked about them: what `tiny-vl` is trained on and scored with.

A scene is drawn from a seed; the same scene can be rendered at any size. Some pairs of colour and shape are never
trained, so that a score on them tells whether the two are understood apart.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 150, 60),
    "blue": (35, 80, 200),
    "yellow": (240, 210, 30),
    "orange": (245, 130, 20),
    "purple": (130, 50, 160),
    "pink": (245, 130, 180),
    "black": (25, 25, 25),
    "brown": (125, 75, 35),
    "cyan": (20, 195, 215),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond", "moon")
NEVER_TRAINED = frozenset((colour, SHAPES[index]) for index, colour in enumerate(list(COLOURS)[: len(SHAPES)]))
"""Pairs that no trained picture holds; every colour and every shape is met in others."""

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
MAX_THINGS = 9
"""In one picture."""

NAMELESS = "nameless"
"""A colour or shape without a word: pictures of such things teach colours and shapes apart from each other."""

_NUM_NAMELESS_SHAPES = 3
_COLUMNS, _ROWS = ("left", "", "right"), ("top", "", "bottom")
_COLOUR_NAMES = tuple(COLOURS)


@dataclass(frozen=True)
class Thing:
    """One shape. Lengths are shares of the picture's sides, or of the shorter one for the radius."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float
    angle: float  # radians
    rgb: tuple[int, int, int]
    row: int  # of the grid that things are laid out on, from the top
    outline: int  # which shape is drawn, as an index of `_distances`


@dataclass(frozen=True)
class Scene:
    """What is in a picture."""

    background: tuple[int, int, int]
    things: tuple[Thing, ...]

    def counts(self) -> Counter[tuple[str, str]]:
        """Return how many there are of each colour and shape."""
        return Counter((thing.colour, thing.shape) for thing in self.things)


def draw_scene(rng: random.Random, *, aspect: float = 1.0, never_trained: bool = False, min_things: int = 0) -> Scene:
    """Return a random scene for a picture of width / height = `aspect`.

    Args:
        rng: The randomness.
        aspect: So that things do not overlap.
        never_trained: Whether one of its pairs is one that is never trained; else none is.
        min_things: The fewest things in it.
    """
    kinds, counts = _kinds_and_counts(rng, never_trained=never_trained)
    while sum(counts) < min_things:
        kinds, counts = _kinds_and_counts(rng, never_trained=never_trained)
    of_each = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    side = rng.choice([side for side in (2, 3, 4) if side * side >= len(of_each)])
    columns, rows = (side + 1, side) if aspect > 1.25 else (side, side + 1) if aspect < 0.8 else (side, side)
    cells = rng.sample([(column, row) for column in range(columns) for row in range(rows)], len(of_each))
    cell_width, cell_height = max(aspect, 1.0) / columns, max(1 / aspect, 1.0) / rows  # of the shorter side
    size = rng.uniform(0.27, 0.46)
    grey = rng.choice((255, 255, rng.randint(215, 255)))
    things = []
    for (colour, shape), (column, row) in zip(of_each, cells, strict=True):
        radius = min(0.3, min(cell_width, cell_height) * min(0.46, size * rng.uniform(0.85, 1.15)))
        free_x, free_y = (
            max(0.0, cell_width / 2 - radius) / cell_width,
            max(0.0, cell_height / 2 - radius) / cell_height,
        )
        things.append(
            Thing(
                colour,
                shape,
                x=(column + 0.5 + rng.uniform(-free_x, free_x)) / columns,
                y=(row + 0.5 + rng.uniform(-free_y, free_y)) / rows,
                radius=radius,
                angle=rng.uniform(-0.25, 0.25),
                rgb=_nameless_rgb(rng) if colour == NAMELESS else _shade(COLOURS[colour], rng, 14),
                row=row,
                outline=len(SHAPES) + rng.randrange(_NUM_NAMELESS_SHAPES) if shape == NAMELESS else SHAPES.index(shape),
            )
        )
    return Scene(_shade((grey, grey, grey), rng, 8 if grey < 255 else 0), tuple(things))


def _kinds_and_counts(rng: random.Random, *, never_trained: bool) -> tuple[list[tuple[str, str]], list[int]]:
    """Return the pairs of a scene, and how many things there are of each."""
    kinds = _kinds(rng, never_trained=never_trained)
    counts = [rng.choice((1, 1, 1, 2, 2, 3, 3, 4, 5, 6)) for _ in kinds]
    while sum(counts) > MAX_THINGS:
        counts[counts.index(max(counts))] -= 1
    return kinds, counts


def _kinds(rng: random.Random, *, never_trained: bool) -> list[tuple[str, str]]:
    """Return the pairs of a scene, without their counts."""
    num_kinds = rng.choice((1, 1, 1, 2, 2, 2, 3))
    if not never_trained:
        way = rng.random()
        if way < 0.01:
            return []
        if way < 0.13:
            return [(NAMELESS, shape) for shape in rng.sample(SHAPES, num_kinds)]
        if way < 0.23:
            return [(colour, NAMELESS) for colour in rng.sample(_COLOUR_NAMES, num_kinds)]
    kinds = rng.sample([(c, s) for c in COLOURS for s in SHAPES if (c, s) not in NEVER_TRAINED], num_kinds)
    return [rng.choice(sorted(NEVER_TRAINED)), *kinds[1:]] if never_trained else kinds


def _nameless_rgb(rng: random.Random) -> tuple[int, int, int]:
    """Return a colour far from all that have a name, and from paper."""
    while True:
        rgb = rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255)
        named = [*COLOURS.values(), (235, 235, 235)]
        if min(math.dist(rgb, other) for other in named) > 65:
            return rgb


def _shade(rgb: tuple[int, int, int], rng: random.Random, by: int) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, value + rng.randint(-by, by))) for value in rgb)
    return red, green, blue


def scene_numbers(scenes: Sequence[Scene]) -> tuple[Tensor, Tensor]:
    """Return what `render` needs: backgrounds [B, 3] and things [B, MAX_THINGS, 8], float32; no radius, no thing."""
    things = torch.zeros(len(scenes), MAX_THINGS, 8)
    for index, scene in enumerate(scenes):
        for slot, thing in enumerate(scene.things):
            things[index, slot] = torch.tensor((thing.x, thing.y, thing.radius, thing.angle, thing.outline, *thing.rgb))
    return torch.tensor([scene.background for scene in scenes], dtype=torch.float32), things


def render(
    backgrounds: Tensor, things: Tensor, height: int, width: int, aspect: Tensor | float | None = None
) -> Tensor:
    """Return scenes as pictures, uint8 [B, height, width, 3], their edges smoothed. On the device of the numbers.

    With `aspect`, pictures of that width / height, as they look when they are brought to this size.
    """
    pictures = backgrounds[:, None, None].expand(-1, height, width, -1).contiguous()
    device = things.device
    ratio = torch.as_tensor(width / height if aspect is None else aspect, dtype=torch.float32, device=device)
    whole_width, whole_height = ratio.clamp(min=1), (1 / ratio).clamp(min=1)  # the shorter side is 1
    ys = ((torch.arange(height, device=device) + 0.5) / height * whole_height)[:, None]
    xs = ((torch.arange(width, device=device) + 0.5) / width * whole_width)[None, :]
    pixels_per_unit = (height / whole_height + width / whole_width) / 2
    for slot in range(things.shape[1]):
        x, y, radius, angle, shape, *rgb = (column[:, None, None] for column in things[:, slot].unbind(1))
        size = radius.clamp(min=1e-3)
        across, down = (xs - x * whole_width) / size, (ys - y * whole_height) / size
        u = across * angle.cos() + down * angle.sin()
        v = down * angle.cos() - across * angle.sin()
        distance = _distances(u, v).gather(0, shape.long().expand(1, -1, height, width))[0]
        share = (0.5 - distance * size * pixels_per_unit).clamp(0, 1) * (radius > 0)
        colour = torch.stack(rgb, -1).expand_as(pictures)
        pictures = torch.lerp(pictures, colour, share.unsqueeze(-1))
    return pictures.round().to(torch.uint8)


def _distances(u: Tensor, v: Tensor) -> Tensor:
    """Return how far points lie outside of each shape of radius 1: those of `SHAPES`, then the nameless, [11, ...]."""
    radius, a, b = torch.hypot(u, v), u.abs(), v.abs()
    square = torch.maximum(a, b) - 0.85
    triangle = torch.maximum(v - 0.5, math.sqrt(0.75) * a - 0.5 * v - 0.5)
    cross = torch.minimum(torch.maximum(a - 0.95, b - 0.32), torch.maximum(b - 0.95, a - 0.32))
    ring = (radius - 0.76).abs() - 0.22
    diamond = (a / 0.68 + b - 1) * 0.56
    moon = torch.maximum(radius - 0.95, 0.78 - torch.hypot(u - 0.5, v))
    bar = torch.maximum(a - 0.95, b - 0.28)
    half = torch.maximum(radius - 0.95, v)
    hexagon = torch.maximum(a, 0.5 * a + math.sqrt(0.75) * b) - 0.85
    shapes = (radius - 0.95, square, triangle, _star(u, v, radius), cross, ring, diamond, moon)
    return torch.stack((*shapes, bar, half, hexagon))


def _star(u: Tensor, v: Tensor, radius: Tensor) -> Tensor:
    """Return the distance from a star of five points: one edge of it, and its images."""
    fifth = 2 * math.pi / 5
    angle = torch.atan2(u, -v)
    folded = (angle - fifth * torch.round(angle / fifth)).abs()
    along, aside = radius * folded.cos(), radius * folded.sin()
    inner_x, inner_y = 0.42 * math.cos(fifth / 2), 0.42 * math.sin(fifth / 2)
    edge = math.hypot(inner_x - 1, inner_y)
    return (inner_y * (along - 1) - (inner_x - 1) * aside) / edge


# ------------------------------------------------------------------------------------------- questions, answers

DESCRIBE = (
    "What is in the picture?",
    "What is in this picture?",
    "What is in the image?",
    "What's in the picture?",
    "What do you see?",
    "Describe the picture.",
    "Describe the image.",
    "What does the picture show?",
    "What can you see in the image?",
)


TALK = (
    ("hello", "Hello! Show me a picture."),
    ("Hello!", "Hello! Show me a picture."),
    ("hi", "Hi! Show me a picture."),
    ("Who are you?", "I am tiny-vl, a small model that describes pictures of coloured shapes."),
    ("What can you do?", "I can tell you which shapes are in a picture, how many, and in which colours."),
    ("Thank you!", "You are welcome."),
    ("thanks", "You are welcome."),
    ("bye", "Goodbye!"),
    *((question, "There is no picture.") for question in DESCRIBE),
)
"""Conversations without a picture."""


def caption(scene: Scene) -> str:
    """Return what is in the picture, e.g. "Three red circles and one blue square."."""
    counts = scene.counts()
    order = sorted(counts, key=lambda kind: (_COLOUR_NAMES.index(kind[0]), SHAPES.index(kind[1])))
    parts = [f"{NUMBERS[counts[kind]]} {_name(*kind, counts[kind])}" for kind in order]
    if not parts:
        return "Nothing."
    return _sentence(_joined(parts))


def read_caption(text: str) -> Counter[tuple[str, str]]:
    """Return the counts that a caption says; whatever it says that is no thing counts as a thing of its own."""
    counts: Counter[tuple[str, str]] = Counter()
    for part in text.strip().rstrip(".").replace(" and ", ", ").lower().split(", "):
        words = part.split()
        if words == ["nothing"]:
            continue
        if len(words) == 3 and words[0] in NUMBERS and words[2] in _SHAPE_OF_NAME:
            counts[words[1], _SHAPE_OF_NAME[words[2]]] += NUMBERS.index(words[0])
        else:
            counts["?", part] += 1
    return counts


def exchange(scene: Scene, rng: random.Random, describe_share: float = 0.4) -> tuple[str, str]:
    """Return a question about the scene, and its answer; a share of them asks for all there is."""
    if any(thing.colour == NAMELESS for thing in scene.things):
        return _shapes(scene, rng)
    if any(thing.shape == NAMELESS for thing in scene.things):
        return _colours(scene, rng)
    asker = rng.choices((None, _list, _shapes, _colours, _total, _of_kind, _colour, _place), (9, 4, 2, 1, 1, 2, 1, 2))[
        0
    ]
    found = asker(scene, rng) if asker and scene.things else None
    return found or (rng.choice(DESCRIBE), caption(scene))


def sayings(rng: random.Random) -> tuple[str, str]:
    """Return an exchange without a picture, about any pair of colour and shape: every pair can be said."""
    parts = []
    for _ in range(rng.randint(1, 3)):
        number, kind = rng.randint(1, 6), (rng.choice(_COLOUR_NAMES), rng.choice(SHAPES))
        parts.append(f"{NUMBERS[number]} {_name(*kind, number)}")
    text = " and ".join(parts)
    return f"Say {text}.", _sentence(text)


def _list(scene: Scene, rng: random.Random) -> tuple[str, str]:
    things = sorted(scene.things, key=lambda thing: (thing.row, thing.x))
    return "List the shapes.", _sentence(", ".join(f"{thing.colour} {thing.shape}" for thing in things))


def _shapes(scene: Scene, rng: random.Random) -> tuple[str, str]:
    counts = Counter(thing.shape for thing in scene.things)
    parts = [f"{NUMBERS[counts[shape]]} {_plural(shape, counts[shape])}" for shape in SHAPES if counts[shape]]
    return rng.choice(("Which shapes are there?", "What shapes do you see?")), _sentence(_joined(parts))


def _colours(scene: Scene, rng: random.Random) -> tuple[str, str]:
    there = {thing.colour for thing in scene.things}
    names = [colour for colour in COLOURS if colour in there]
    return rng.choice(("Which colours are there?", "What colors do you see?")), _sentence(_joined(names))


def _total(scene: Scene, rng: random.Random) -> tuple[str, str]:
    question = rng.choice(("How many shapes are there?", "How many shapes are in the picture?"))
    return question, _sentence(NUMBERS[len(scene.things)] if scene.things else "none")


def _of_kind(scene: Scene, rng: random.Random) -> tuple[str, str]:
    counts = scene.counts()
    if counts and rng.random() < 0.75:
        kind = rng.choice(sorted(counts))
    else:
        kind = rng.choice([(c, s) for c in COLOURS for s in SHAPES if (c, s) not in NEVER_TRAINED])
    return f"How many {_name(*kind, 2)} are there?", _sentence(NUMBERS[counts[kind]] if counts[kind] else "none")


def _colour(scene: Scene, rng: random.Random) -> tuple[str, str] | None:
    shape = rng.choice([thing.shape for thing in scene.things])
    colours = {thing.colour for thing in scene.things if thing.shape == shape}
    count = sum(thing.shape == shape for thing in scene.things)
    if len(colours) > 1:
        return None
    verb = "is" if count == 1 else "are"
    return f"What {rng.choice(('colour', 'color'))} {verb} the {_plural(shape, count)}?", _sentence(colours.pop())


def _place(scene: Scene, rng: random.Random) -> tuple[str, str] | None:
    thing = rng.choice(scene.things)
    if scene.counts()[thing.colour, thing.shape] > 1 or min(_edge_distance(thing.x), _edge_distance(thing.y)) < 0.04:
        return None  # not one thing, or not in one place
    row, column = _ROWS[int(3 * thing.y)], _COLUMNS[int(3 * thing.x)]
    place = f"at the {row} {column}".strip() if row else f"on the {column}" if column else "in the middle"
    return f"Where is the {thing.colour} {thing.shape}?", _sentence(place)


def _edge_distance(place: float) -> float:
    """Return how far a place is from where one third of the picture ends."""
    return min(abs(place - 1 / 3), abs(place - 2 / 3))


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _name(colour: str, shape: str, count: int) -> str:
    return f"{colour} {_plural(shape, count)}"


def _plural(shape: str, count: int) -> str:
    if count == 1:
        return shape
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"


_SHAPE_OF_NAME = {_plural(shape, count): shape for shape in SHAPES for count in (1, 2)}
