"""What every test shares: how hypothesis searches."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: these machines are shared, and time is never what a property is about. In CI the search is the same at
# every run, so that what fails there fails again here; elsewhere it looks for new cases each time.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
