"""What `keystage doctor` asks of the Redis that keeps asynchronous calls; it writes nothing there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keystage.cli.doctor_report import Check, judged

AREA = "redis"
ANSWER_S = 3.0
LEAST_VERSION = (6, 2)
BOUND = "an answer, of Redis 6.2 or newer that keeps an append-only file and evicts no key"
_NO_ANSWER = (
    "asynchronous calls get 503 until it answers: start it, or correct KEYSTAGE_REDIS (without that variable "
    "calls are kept in the gateway's memory)"
)
_NO_RIGHT = "user or password in KEYSTAGE_REDIS are wrong, or that user may not read INFO: redis-cli ACL LIST"


def checks(address: str) -> list[Check]:
    """One Redis.

    Args:
        address: as the gateway has it; a password in it is not told.
    """
    from keystage.wire.redis_address import check_redis, shown

    try:
        check_redis(address)
    except ValueError as error:
        return [_failed("KEYSTAGE_REDIS", "an address of a Redis", "another text", str(error))]
    thing = f"Redis at {shown(address)}"
    try:
        info = _asked(address)
    except ImportError:
        return [_failed(thing, BOUND, "the client is not installed", "pip install 'keystage[gateway]'")]
    except PermissionError as error:
        return [_failed(thing, BOUND, str(error), _NO_RIGHT)]
    except OSError as error:
        return [_failed(thing, BOUND, str(error), _NO_ANSWER)]
    actual, advice = _found(info)
    return [judged(AREA, thing, BOUND, actual, "warn", advice, is_met=not advice)]


def _found(info: Mapping[str, Any]) -> tuple[str, str]:
    """What it is, and what to do; that is empty where all is well."""
    version, policy = str(info.get("redis_version", "0")), str(info.get("maxmemory_policy", ""))
    actual, advice = [version], []
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < LEAST_VERSION:
        advice.append("upgrade it: it lacks commands of the queue")
    if not info.get("aof_enabled"):
        actual.append("no append-only file")
        advice.append("accepted calls are lost with it: CONFIG SET appendonly yes")
    if info.get("maxmemory") and policy.startswith("allkeys"):
        actual.append(f"maxmemory-policy {policy}")
        advice.append("it may evict accepted calls: CONFIG SET maxmemory-policy noeviction")
    return ", ".join(actual), "; ".join(advice)


def _asked(address: str) -> Mapping[str, Any]:
    """What it tells of itself.

    Raises:
        ImportError: there is no client.
        PermissionError: it does not take the credentials.
        OSError: it does not answer.
    """
    import redis

    client = redis.Redis.from_url(address, socket_connect_timeout=ANSWER_S, socket_timeout=ANSWER_S)
    try:
        return dict(client.info())
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        raise PermissionError(str(error).rstrip(".")) from error
    except redis.RedisError as error:
        raise OSError(str(error).rstrip(".")) from error
    finally:
        client.close()


def _failed(thing: str, bound: str, actual: str, advice: str) -> Check:
    return Check(area=AREA, level="fail", thing=thing, bound=bound, actual=actual, advice=advice)
