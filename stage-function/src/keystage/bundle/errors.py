"""Errors of the bundle part: what is wrong with a bundle, or with a model to be split.

Command lines print the message as one line and leave with `exit_code`; servers answer with
`http_status`. A message names the thing, the bound and the actual value.
"""

from __future__ import annotations


class BundleError(Exception):
    """A bundle is missing, damaged or of a version this program does not know."""

    exit_code = 2
    http_status = 500


class SplitError(Exception):
    """A model cannot be split as asked: the model, or the wish, is at fault."""

    exit_code = 2
    http_status = 422
