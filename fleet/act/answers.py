"""What the API server says: an object, or a refusal, and what for."""

from __future__ import annotations

import json
from typing import Any

from fleet.errors import FleetError
from fleet.world import reading

Object = dict[str, Any]
# Its own words for: not this object, not any more, not as it was seen.
CHANGED_MEANWHILE = (404, 409, 410, 412)
BUDGET = 429
DENIED = "admission webhook "


class ApiError(FleetError):
    def __init__(
        self, what: str, why: str, status: int = 0, said: str = "", causes: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """`said`: in its own words, whole. `causes`: which field, and what is wrong with it."""
        super().__init__(what, why)
        self.status, self.said, self.causes = status, said, causes


def read(what: str, text: bytes) -> Object:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(what, "the answer is no JSON object")
    return found


def refusal(what: str, status: int, text: str) -> ApiError:
    """Another uid than the object's is invalid to the server, as is what a policy refuses; and a webhook refuses with
    whatever status it likes, also with that of what has changed meanwhile."""
    try:
        said = reading.mapping(json.loads(text), "")
        causes = reading.items(reading.mapping(said.get("details"), "details").get("causes"), "causes")
        each = [reading.mapping(cause, "causes") for cause in causes]
    except (FleetError, ValueError, RecursionError):
        said, each = {"message": text}, []
    found = tuple((str(one.get("field") or ""), str(one.get("message") or "")) for one in each)
    message = str(said.get("message", text))
    another = 409 if status == 422 and {field for field, _ in found} == {"metadata.uid"} else status
    status_ = 403 if message.startswith(DENIED) else another
    return ApiError(what, f"{status} {message[:200]}", status_, message, found)


def reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
