"""Fuzzing: every parser and every HTTP API against hostile input, with a kept corpus (`make fuzz`).

`targets.py` lists what is fuzzed, `runner.py` shares out the time and prints what came of it, `child.py`
runs one target in a process of its own. Regressions lie in `regressions/TARGET/`, one input a file.
"""
