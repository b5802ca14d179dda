"""GPT-2's printable stand-ins for the 256 bytes, which byte-level vocabularies are written in."""

_KEPT = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
_OTHERS = [byte for byte in range(256) if byte not in _KEPT]

BYTE_OF_CHAR = {chr(byte): byte for byte in _KEPT} | {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}
