"""Alias of `health.api` under its old name, for a site's checks: they outlive images."""

import sys

from health import api

sys.modules[__name__] = api
