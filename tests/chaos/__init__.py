"""Chaos: faults on a seeded schedule over a live local system under load; a checker knows every answer.

`make chaos` runs it (`python -m chaos` in this folder's parent); docs/operating.md says what it shows. The
way of a run: `model` (a bundle, and what every request must be answered) -> `world` (`keystage up --nodes 2`
and a Redis) -> `load` (clients that reconnect) beside `faults` (what `schedule` drew) -> `checker` (what
came) and `proof` (who held work when it was hit) -> `report`.
"""
