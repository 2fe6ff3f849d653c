"""Puts the parts that serve requests with a key together as the settings say. Called by `router.app`."""

from __future__ import annotations

import hashlib

from keystage.bundle.api import Pipeline
from keystage.router.config import RouterConfig
from keystage.router.idempotency_runs import KeyedRequests
from keystage.router.journal import Journal


def keyed_requests(config: RouterConfig, pipeline: Pipeline, incarnation: str) -> KeyedRequests:
    """What answers each key once; with a journal in Redis where one is named.

    Args:
        config: the router's settings.
        pipeline: what is served.
        incarnation: of this router.
    """
    journal: Journal | None = None
    if config.redis is not None:
        # Only who needs Redis pays for the import of its client.
        from keystage.router.journal_redis import JournalSettings, RedisJournal

        settings = JournalSettings(
            config.redis.get_secret_value(),
            _scope(config.installation, pipeline),
            config.idempotency_s,
            config.deadline_s,
            config.journal_wait_s,
            config.journal_lease_s,
        )
        journal = RedisJournal(settings, incarnation)
    return KeyedRequests(config.key_bounds(), journal)


def _scope(installation: str, pipeline: Pipeline) -> str:
    """What keeps keys apart: another model must not go on with the answer of this one."""
    identities = hashlib.sha256(" ".join(stage.identity for stage in pipeline.stages).encode())
    where = hashlib.sha256(installation.encode()).hexdigest()[:12]
    return f"{where}:{pipeline.name}:{identities.hexdigest()[:12]}"
