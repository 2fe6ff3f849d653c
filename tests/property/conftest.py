"""Settings of all property tests."""

from hypothesis import settings

# A machine may be busy: how long an example takes is no property.
settings.register_profile("keystage", deadline=None)
settings.load_profile("keystage")
