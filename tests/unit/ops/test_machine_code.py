"""The search of machine code finds registers that are written while a product reads them, and nothing else."""

from __future__ import annotations

import pytest
from machine_code import overwrites_operands

_PRODUCT = "HGMMA.64x16x16.F32.BF16 R24, R40, gdesc[UR4], R24, gsb0"
_WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
_AGAIN = "@P1 BRA `(.L_x_0)"


def _listing(*lines: str) -> str:
    """Return instructions as nvdisasm prints them; names with a colon are labels."""
    return "\n".join(line if line.endswith(":") else f"        /*00a0*/   {line} ;  /* 0x0 */" for line in lines)


@pytest.mark.parametrize(
    "lines",
    [
        (".L_x_0:", "LOP3.LUT R42, R1, 0xf, RZ, 0xc0, !PT", _PRODUCT, _AGAIN, _WAIT, "EXIT"),
        (".L_x_0:", "LEA R43, R1, R2, 0x1", _WAIT, _PRODUCT, "@P1 BRA P2, `(.L_x_0)", _WAIT, "EXIT"),
        (_PRODUCT, "LDS.128 R37, [R8]", _WAIT, "EXIT"),
        (_PRODUCT, "CS2R R42, SRZ", _WAIT, "EXIT"),
        (_PRODUCT, "SHFL.BFLY PT, R41, R3, 0x1, 0x1f", _WAIT, "EXIT"),
        (_PRODUCT, "HGMMA.64x64x16.F32.BF16 R16, R80, gdesc[UR4], R16, gsb0", _WAIT, "EXIT"),
        (_PRODUCT, _PRODUCT, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R40, R1", "EXIT"),
        (_PRODUCT, "@P0 BRA `(.L_x_0)", _WAIT, ".L_x_0:", "MOV R40, R1", "EXIT"),
        ("BRA `(.L_x_1)", ".L_x_0:", "MOV R40, R1", "BRA `(.L_x_2)", ".L_x_1:", _PRODUCT, "BRA `(.L_x_0)", ".L_x_2:"),
    ],
)
def test_what_is_read_may_not_be_written(lines: tuple[str, ...]) -> None:
    assert overwrites_operands(_listing(*lines))


@pytest.mark.parametrize(
    "lines",
    [
        (".L_x_0:", "LOP3.LUT R42, R1, 0xf, RZ, 0xc0, !PT", _PRODUCT, _WAIT, _AGAIN, "EXIT"),
        (".L_x_0:", "LOP3.LUT R44, R1, 0xf, RZ, 0xc0, !PT", _PRODUCT, _AGAIN, _WAIT, "EXIT"),
        (_PRODUCT, "STS.64 [R40], R2", "ISETP.GE.AND P0, PT, R40, R3, PT", _WAIT, "MOV R40, R1", "EXIT"),
        (_PRODUCT, _PRODUCT.replace("R40", "R60"), "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R40, R1", _WAIT, "EXIT"),
        ("@P0 BRA `(.L_x_0)", _PRODUCT, "BRA `(.L_x_1)", ".L_x_0:", "MOV R40, R1", ".L_x_1:", _WAIT, "EXIT"),
        ("HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], gdesc[UR4], R24, gsb0", "MOV R40, R1", _WAIT, "EXIT"),
    ],
)
def test_what_is_awaited_may_be_written(lines: tuple[str, ...]) -> None:
    assert not overwrites_operands(_listing(*lines))
