"""Traces of function invocations and LLM requests, streamed in order of time.

Comes before `plan`, which turns invocations into a schedule; speed and rate are changed there, not
here. Reads files, keeps no clock; random numbers only place per-minute counts within their minute.
"""

from keystage.loadgen.trace_lines import TraceError
from keystage.loadgen.traces.model import KINDS, Facts, Function, Invocation, Selection
from keystage.loadgen.traces.opening import Trace, detect, open_trace

__all__ = [
    "KINDS",
    "Facts",
    "Function",
    "Invocation",
    "Selection",
    "Trace",
    "TraceError",
    "detect",
    "open_trace",
]
