"""The old name of `health.api`, for checks of a site that were written before it: they outlive images."""

import sys

from health import api

sys.modules[__name__] = api
