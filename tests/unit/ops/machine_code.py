"""What is looked for in a kernel's machine code, as nvdisasm prints it."""

from __future__ import annotations

import re

_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+ )?(.*?) ;")
_PRODUCT = re.compile(r"[HQI]GMMA\.64x(\d+)x\d+\.(F32|F16|S32)\S* R\d+, R(\d+),")
_MOST_GROUPS = 8
"""Further groups of products count as so many: kernels await all but few."""


def overwrites_operands(code: str) -> bool:
    """Return whether, on some path, registers are written that a product under way reads.

    See `finished` of raypp.ops.cuda.kernel_launch. A register is read from its product on, until it is awaited: for
    each, the state has how many groups of products were closed since, 0 where its own is still open.
    """
    instructions, following = _flow(code)
    states: list[dict[int, int] | None] = [None] * len(instructions)
    to_do = [(0, dict[int, int]())] if instructions else []
    while to_do:
        place, entering = to_do.pop()
        known = states[place]
        state = dict(known or {})
        for register, groups in entering.items():
            state[register] = min(groups, state.get(register, _MOST_GROUPS))
        if known == state:
            continue
        states[place] = state
        instruction = instructions[place]
        if state.keys() & _written(instruction):
            return True
        to_do += [(after, _after(instruction, state)) for after in following[place]]
    return False


def _flow(code: str) -> tuple[list[str], list[list[int]]]:
    """Return the instructions, and the places of those that may follow each."""
    instructions, is_conditional, places = list[str](), list[bool](), dict[str, int]()
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = len(instructions)
        elif found := _LINE.match(line):
            instructions.append(found[2])
            is_conditional.append(found[1] is not None)
    following = []
    for place, (instruction, may_not) in enumerate(zip(instructions, is_conditional, strict=True)):
        jump = re.match(r"BRA\S* (.*)`\((\.L_x_\d+)\)", instruction)
        goes_on = may_not or not (instruction.startswith(("EXIT", "RET")) or (jump and not jump[1]))
        after = [place + 1] if goes_on and place + 1 < len(instructions) else []
        following.append(after + ([places[jump[2]]] if jump else []))
    return instructions, following


def _after(instruction: str, state: dict[int, int]) -> dict[int, int]:
    """Return the state after an instruction."""
    if awaited := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", instruction):
        return {register: groups for register, groups in state.items() if groups <= int(awaited[1], 16)}
    if "GMMA." not in instruction:
        return state
    product = _PRODUCT.match(instruction)
    read = range(int(product[3]), int(product[3]) + 4) if product else ()
    closes = "gsb0" in instruction
    state = state | dict.fromkeys(read, 0)
    return {register: min(groups + closes, _MOST_GROUPS) for register, groups in state.items()}


def _written(instruction: str) -> set[int]:
    """Return the registers that an instruction writes."""
    name, _, operands = instruction.partition(" ")
    if name.startswith(("SHFL", "ATOM")):
        operands = re.sub(r"^U?P\w+, ", "", operands)
    first = re.match(r"R(\d+)\b", operands)
    if first is None:
        return set()
    if product := _PRODUCT.match(instruction):
        width = int(product[1]) // (4 if product[2] == "F16" else 2)
    elif ".128" in name or name.endswith(".4"):
        width = 4
    else:
        is_double = ".64" in name or ".WIDE" in name or name.endswith(".2") or re.match(r"CS2R(?!\.32)|D[A-Z]", name)
        width = 2 if is_double else 1
    return set(range(int(first[1]), int(first[1]) + width))
