"""Small trace files of every format, and where the genuine ones are."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from keystage.loadgen.traces import Invocation

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "traces"

COUNTS_2019 = (
    "HashOwner,HashApp,HashFunction,Trigger,480,481,482\n"
    "o1,a1,f1,http,3,0,2\n"
    "o1,a1,f2,timer,1,1,1\n"
    "o2,a2,f3,queue,0,40,0\n"
    "o2,a2,f4,http,0,0,0\n"
)
DURATIONS_2019 = (
    "HashOwner,HashApp,HashFunction,Average,Count,Minimum,Maximum,"
    + ",".join(f"percentile_Average_{p}" for p in (0, 1, 25, 50, 75, 99, 100))
    + "\no1,a1,f1,20,9,10,40,10,10,20,20,30,40,40\no2,a2,f3,5,9,5,5,5,5,5,5,5,5,5\n"
)
MEMORY_2019 = "HashOwner,HashApp,SampleCount,AverageAllocatedMb,AverageAllocatedMb_pct1\no1,a1,7,128.5,100\n"
EVENTS_2021 = (
    "app,func,end_timestamp,duration\na1,f1,1.5,0.5\na2,f1,4.0,2.5\na1,f2,2.25,0.25\na1,f1,9.0,0.0\n"
)
REQUESTS_AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319600,3180,8\n"
    "2023-11-16 18:17:06.9799600,110,27\n"
)
REQUESTS_MOONCAKE = (
    '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 1500, "input_length": 7322, "output_length": 490, "hash_ids": [0, 2]}\n'
    '{"timestamp": 1500.5, "input_length": 1, "output_length": 0}\n'
)
GOOD = {
    "azure-functions-2019": COUNTS_2019,
    "azure-functions-2021": EVENTS_2021,
    "azure-llm": REQUESTS_AZURE,
    "mooncake": REQUESTS_MOONCAKE,
}
ROWS = {"azure-functions-2019": 48, "azure-functions-2021": 4, "azure-llm": 3, "mooncake": 3}


def genuine(name: str) -> Path:
    """A genuine trace file beside the checkout; skips the test where there is none."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"no {name} in shared/traces beside the checkout")
    return path


def minute_counts(invocations: Iterable[Invocation], first_minute: int) -> Counter[tuple[str, int]]:
    """Arrivals by function and minute, as a file of counts has them; checks that times ascend."""
    found: Counter[tuple[str, int]] = Counter()
    last_s = 0.0
    for one in invocations:
        assert one.at_s >= last_s
        last_s = one.at_s
        found[one.function, first_minute + int(one.at_s // 60)] += 1
    return found


def counts_in(path: Path) -> Counter[tuple[str, int]]:
    """The same of a 2019 file, read plainly."""
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    found: Counter[tuple[str, int]] = Counter()
    for row in rows:
        for minute, count in zip(header[4:], row[4:], strict=True):
            found[f"{row[1]}/{row[2]}", int(minute)] += int(count)
    return +found


def events(starts_s: Sequence[float]) -> str:
    """A 2021 file of one function, durations of half a second."""
    rows = [f"a,f,{start_s + 0.5!r},0.5" for start_s in starts_s]
    return "\n".join(("app,func,end_timestamp,duration", *rows, ""))
