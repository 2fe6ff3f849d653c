"""Spoken English from a text, where the package `espeakng_loader` (eSpeak NG) is installed."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

_RETRIEVE, _POSITION_CHARACTER, _UTF8, _RATE = 2, 1, 1, 1


def spoken(text: str, words_per_minute: int = 140) -> tuple[bytes, int] | None:
    """Samples as 16 bit PCM, and how many a second; None without the package."""
    spec = importlib.util.find_spec("espeakng_loader")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    library = ctypes.CDLL(str(folder / "libespeak-ng.so.1"))
    rate = library.espeak_Initialize(_RETRIEVE, 0, str(folder / "espeak-ng-data").encode(), 0)
    heard = bytearray()

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    def take(samples: int | None, count: int, _events: int) -> int:
        if samples and count > 0:
            heard.extend(ctypes.string_at(samples, 2 * count))
        return 0

    library.espeak_SetSynthCallback(take)
    library.espeak_SetVoiceByName(b"en-us")
    library.espeak_SetParameter(_RATE, words_per_minute, 0)
    raw = text.encode()
    library.espeak_Synth(raw, len(raw) + 1, 0, _POSITION_CHARACTER, 0, _UTF8, None, None)
    library.espeak_Synchronize()
    return bytes(heard), rate
