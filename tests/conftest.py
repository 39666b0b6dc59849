"""No time limit on property tests: on a loaded machine it would fail what is right."""

from hypothesis import settings

settings.register_profile("meshwise", deadline=None, print_blob=True)
settings.load_profile("meshwise")
