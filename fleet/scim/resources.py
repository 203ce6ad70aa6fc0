"""SCIM's resources (RFC 7643): describe users and groups, read them from requests, and apply PATCH to them. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fleet.scim.filters import EXTENSION, GROUP, USER, Path, ScimError, attribute, parse_filter, parse_path
from fleet.scim.roster import Requested, Roster
from init.people.spec import has_access, timestamp

BASE = "/scim/v2"
MESSAGE = "urn:ietf:params:scim:api:messages:2.0:"
CORE = "urn:ietf:params:scim:schemas:core:2.0:"
KINDS = {"Users": USER, "Groups": GROUP}
# In one page of an answer, and operations of one PATCH.
MOST, MOST_OPERATIONS = 1000, 1000
Object = dict[str, Any]


def _attribute(name: str, about: str, type_: str = "string", sub: Iterable[Object] = (), **more: object) -> Object:
    entry = {"name": name, "type": type_, "multiValued": False, "description": about, "required": False,
             "caseExact": type_ == "reference", "mutability": "readWrite", "returned": "default",
             "uniqueness": "none"} | more  # fmt: skip
    return entry | ({"subAttributes": [*sub]} if sub else {})


def _elements(kind: str, mutability: str) -> list[Object]:
    """Describe the parts of a membership."""
    return [
        _attribute("value", "The id.", caseExact=True, mutability=mutability),
        _attribute("$ref", "The address.", "reference", referenceTypes=[kind], mutability=mutability),
    ]


SCHEMAS = {
    USER: ("User", "A person who may log in.", [
        _attribute("userName", "The name; the part before @ is the Linux name.", required=True, uniqueness="server"),
        _attribute("displayName", "The whole name."),
        _attribute("active", "Whether the person has access.", "boolean"),
        _attribute("groups", "Groups of the person.", "complex", _elements("Group", "readOnly"), multiValued=True,
                   mutability="readOnly"),
    ]),
    GROUP: ("Group", "A group of people.", [
        _attribute("displayName", "The name of the Linux group.", required=True, uniqueness="server"),
        _attribute("members", "People of the group.", "complex", _elements("User", "immutable"), multiValued=True),
    ]),
    EXTENSION: ("minivm", "What Linux needs of a person.", [
        _attribute("sshKeys", "Public ssh keys, each one line.", multiValued=True, caseExact=True),
        _attribute("uid", "The user id; it never changes.", "integer", mutability="immutable", uniqueness="server"),
    ]),
}  # fmt: skip
# The known attributes by their name in lower case.
NAMES = {schema: {entry["name"].lower(): entry["name"] for entry in SCHEMAS[schema][2]} for schema in SCHEMAS}
for schema in (USER, GROUP):
    NAMES[schema]["externalid"] = "externalId"
NAMES[USER][EXTENSION.lower()] = EXTENSION
# Read for a display name when a user is created without one.
NAMES[USER]["name"] = "name"


def schemas() -> list[Object]:
    return [
        {"schemas": [f"{CORE}Schema"], "id": key, "name": name, "description": about, "attributes": attributes,
         "meta": {"resourceType": "Schema", "location": f"{BASE}/Schemas/{key}"}}
        for key, (name, about, attributes) in SCHEMAS.items()
    ]  # fmt: skip


def resource_types() -> list[Object]:
    types: list[Object] = [
        {"schemas": [f"{CORE}ResourceType"], "id": SCHEMAS[key][0], "name": SCHEMAS[key][0], "endpoint": f"/{kind}",
         "description": SCHEMAS[key][1], "schema": key,
         "meta": {"resourceType": "ResourceType", "location": f"{BASE}/ResourceTypes/{SCHEMAS[key][0]}"}}
        for kind, key in KINDS.items()
    ]  # fmt: skip
    types[0]["schemaExtensions"] = [{"schema": EXTENSION, "required": False}]
    return types


def provider(largest: int) -> Object:
    no = {"supported": False}
    return {
        "schemas": [f"{CORE}ServiceProviderConfig"], "patch": {"supported": True}, "etag": {"supported": True},
        "bulk": no | {"maxOperations": 0, "maxPayloadSize": largest}, "sort": no, "changePassword": no,
        "filter": {"supported": True, "maxResults": MOST},
        "authenticationSchemes": [{"type": "oauthbearertoken", "name": "Bearer token", "primary": True,
                                   "description": "A token of the operator, in the Authorization header."}],
        "meta": {"resourceType": "ServiceProviderConfig", "location": f"{BASE}/ServiceProviderConfig"},
    }  # fmt: skip


def keys_of(roster: Roster, kind: str) -> list[str]:
    return [*roster.users] if kind == "Users" else roster.list_shown_groups()


def describer(roster: Roster, kind: str, now: int) -> Callable[[str], Object]:
    """Return a function that describes the user or group of an id, without `meta`."""
    ids = {group.name: key for key, group in roster.groups.items()}
    members = roster.members() if kind == "Groups" else {}

    def user(key: str) -> Object:
        person = roster.users[key]
        groups = [
            {"value": ids[name], "$ref": f"{BASE}/Groups/{ids[name]}"}
            for name in (person.group, *person.groups)
            if name != roster.rules.group
        ]
        keys = [f"{item.line} {item.comment}".strip() for item in person.keys]
        resource = _head(roster, key, USER) | {"userName": roster.records[key].given}
        resource |= {"displayName": person.gecos} if person.gecos else {}
        resource |= {"active": has_access(person, now)} | ({"groups": groups} if groups else {})
        return resource | {EXTENSION: {"uid": person.uid} | ({"sshKeys": keys} if keys else {})}

    def group(key: str) -> Object:
        listed = [{"value": member, "$ref": f"{BASE}/Users/{member}"} for member in members[roster.groups[key].name]]
        return _head(roster, key, GROUP) | {"displayName": roster.records[key].given} | (
            {"members": listed} if listed else {}
        )  # fmt: skip

    return user if kind == "Users" else group


def _head(roster: Roster, key: str, schema: str) -> Object:
    head: Object = {"schemas": [schema] + [EXTENSION] * (schema == USER), "id": key}
    external = roster.records[key].external
    return head | ({"externalId": external} if external else {})


def version(resource: Mapping[str, Any]) -> str:
    text = json.dumps(resource, sort_keys=True).encode("utf-8", "surrogatepass")
    return f'W/"{hashlib.sha256(text).hexdigest()[:16]}"'


def with_meta(roster: Roster, kind: str, resource: Object) -> Object:
    record = roster.records[resource["id"]]
    times = {"created": record.created, "lastModified": record.modified or record.created}
    meta = {"resourceType": SCHEMAS[KINDS[kind]][0], "location": f"{BASE}/{kind}/{resource['id']}"}
    meta |= {key: timestamp(value) for key, value in times.items() if value}
    return resource | {"meta": meta | {"version": version(resource)}}


def find(roster: Roster, kind: str, query: Mapping[str, str], now: int) -> Object:
    """Answer a query: a filter, and a page of what it matches."""
    describe = describer(roster, kind, now)
    described = [describe(key) for key in keys_of(roster, kind)]
    if "filter" in query:
        matches = parse_filter(query["filter"])
        described = [resource for resource in described if matches(with_meta(roster, kind, resource) if "meta" in
                 query["filter"].lower() else resource)]  # fmt: skip
    first = max(1, _number(query, "startIndex", 1))
    count = min(MOST, max(0, _number(query, "count", MOST)))
    page = [select(with_meta(roster, kind, resource), query) for resource in described[first - 1 : first - 1 + count]]
    return list_response(page, len(described), first)


def list_response(page: list[Object], total: int, first: int = 1) -> Object:
    return {"schemas": [f"{MESSAGE}ListResponse"], "totalResults": total, "startIndex": first,
            "itemsPerPage": len(page), "Resources": page}  # fmt: skip


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not re.fullmatch(r"-?[0-9]{1,11}", text):
        raise ScimError(400, f"{name}: wanted a whole number, not {text[:20]!r}", "invalidValue")
    return int(text)


def select(resource: Object, query: Mapping[str, str]) -> Object:
    """Keep or leave out what `attributes` or `excludedAttributes` name; the id and its like always stay."""
    always = {"schemas", "id", "meta"} if "attributes" not in query else {"schemas", "id"}
    for name, keeps in (("attributes", True), ("excludedAttributes", False)):
        if name in query:
            paths = [attribute(text) for text in query[name].split(",")]
            resource = {
                key: selected
                for key, value in resource.items()
                if (selected := value if key in always else _select(key, value, paths, keeps)) not in (None, {}, [])
            }
    return resource


def _select(key: str, value: Any, paths: list[tuple[str, ...]], keeps: bool) -> Any:
    """Return what remains of one attribute; None for nothing."""
    about = [path[1] if len(path) > 1 else "" for path in paths if path[0] == key.lower()]
    if "" in about or not about:
        return value if keeps == bool(about) else None
    if isinstance(value, dict):
        return {sub: item for sub, item in value.items() if (sub.lower() in about) == keeps}
    return [_select(key, item, paths, keeps) for item in value] if isinstance(value, list) else value


def read_request(data: Mapping[str, Any], kind: str, *, creates: bool) -> Requested:
    """Read a user or group of a request. Attributes that people.yaml has no place for are ignored."""
    item = keep_known_attributes(data, KINDS[kind])
    external = _optional(item, "externalId")
    if kind == "Groups":
        members = None
        if "members" in item:
            members = tuple(text(member, "value") for member in _mappings(item, "members"))
        return Requested(text(item, "displayName"), external, members=members)
    more = keep_known_attributes(_mapping(item, EXTENSION), EXTENSION)
    keys = _lines(more["sshKeys"]) if "sshKeys" in more else None
    uid = more.get("uid")
    if uid is not None and (isinstance(uid, bool) or not isinstance(uid, int)):
        raise ScimError(400, f"uid: wanted a whole number, not {str(uid)[:20]!r}", "invalidValue")
    gecos = _optional(item, "displayName")
    if gecos is None and creates and (name := _mapping(item, "name")):
        parts = (name.get("formatted"),) if name.get("formatted") else (name.get("givenName"), name.get("familyName"))
        gecos = " ".join(part for part in parts if isinstance(part, str))
    active = None if item.get("active") is None else _boolean(item["active"])
    return Requested(text(item, "userName"), external, active, gecos, keys, uid)


def keep_known_attributes(data: Mapping[str, Any], schema: str) -> Object:
    """Return the attributes that are held; upper and lower case of a name are the same."""
    return {NAMES[schema][key.lower()]: value for key, value in data.items() if key.lower() in NAMES[schema]}


def text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ScimError(400, f"{key}: wanted text, not {str(value)[:40]!r}", "invalidValue")
    return value.strip()


def _optional(data: Mapping[str, Any], key: str) -> str | None:
    """Return "" for what is given as nothing, and None where the request does not say."""
    return ("" if data[key] in (None, "") else text(data, key)) if key in data else None


def _mapping(data: Mapping[str, Any], key: str) -> Object:
    value = data.get(key)
    if value is not None and not isinstance(value, dict):
        raise ScimError(400, f"{key[:80]}: wanted an object", "invalidValue")
    return value or {}


def _mappings(data: Mapping[str, Any], key: str) -> list[Object]:
    value = data.get(key)
    value = [value] if isinstance(value, dict) else value or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ScimError(400, f"{key}: wanted a list of objects, each with a value", "invalidValue")
    return value


def _lines(value: Any) -> tuple[str, ...]:
    """Read ssh keys: a list, or one text with a key in each line, since providers map one text more easily."""
    items = value.splitlines() if isinstance(value, str) else value or []
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ScimError(400, "sshKeys: wanted a list of public keys", "invalidValue")
    return tuple(item for item in items if item.strip())


def _boolean(value: Any) -> bool:
    """Read a boolean; Entra sends it as text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ScimError(400, f"active: wanted true or false, not {str(value)[:20]!r}", "invalidValue")


def patch(resource: Object, body: Mapping[str, Any], kind: str) -> Object:
    """Apply the operations of a PATCH to a resource, in the forms of Okta and of Entra."""
    body = {key.lower(): value for key, value in body.items()}
    operations = body.get("operations")
    if not isinstance(operations, list) or not operations or len(operations) > MOST_OPERATIONS:
        raise ScimError(400, f"Operations: wanted a list of 1 to {MOST_OPERATIONS}", "invalidSyntax")
    result: Object = json.loads(json.dumps(resource))
    for operation in operations:
        name, path, value = _operation(operation)
        if path is not None:
            _change(result, parse_path(path), name, value, kind)
        elif isinstance(value, dict):
            for key, item in value.items():
                _change(result, parse_path(key), name, item, kind)
        else:
            raise ScimError(400, "an operation without a path has an object as its value", "noTarget")
    return result


def _operation(operation: Any) -> tuple[str, str | None, Any]:
    if not isinstance(operation, dict):
        raise ScimError(400, "Operations: wanted objects", "invalidSyntax")
    fields = {key.lower(): value for key, value in operation.items()}
    name, path = str(fields.get("op")).lower(), fields.get("path") or None
    if name not in ("add", "replace", "remove"):
        raise ScimError(400, f"op: wanted add, replace or remove, not {name[:20]!r}", "invalidSyntax")
    if path is not None and not isinstance(path, str):
        raise ScimError(400, "path: wanted text", "invalidPath")
    if name == "remove" and path is None:
        raise ScimError(400, "a removal needs a path", "noTarget")
    if name != "remove" and "value" not in fields:
        raise ScimError(400, f"{name} needs a value", "invalidValue")
    return name, path, fields.get("value")


def _change(resource: Object, path: Path, name: str, value: Any, kind: str) -> None:
    """Change one attribute. One that is not held is ignored: providers map many more by default."""
    schema = KINDS[kind]
    if path.parts[0] == "id" or (path.parts[0] == "groups" and kind == "Users"):
        if path.parts[0] == "id" and value == resource["id"]:
            return  # Okta repeats it
        raise ScimError(400, f"{path.parts[0]} cannot be changed", "mutability")
    key = NAMES[schema].get(path.parts[0])
    if key is None or key == "name":
        return
    if key == "members":
        _change_members(resource, path, name, value)
    elif key == EXTENSION:
        inner = resource.setdefault(EXTENSION, {})
        changes = {path.parts[1]: value} if len(path.parts) > 1 else _mapping({key: value}, key)
        for sub, item in keep_known_attributes(changes or dict.fromkeys(NAMES[EXTENSION]), EXTENSION).items():
            _set(inner, sub, name, item)
    elif len(path.parts) > 1 or path.element:
        raise ScimError(400, f"{key} has no parts", "invalidPath")
    else:
        _set(resource, key, name, value)


def _set(resource: Object, key: str, name: str, value: Any) -> None:
    if name == "remove":
        resource[key] = None
    elif name == "add" and key == "sshKeys":
        resource[key] = [*dict.fromkeys([*_lines(resource.get(key)), *_lines(value)])]
    else:
        resource[key] = value


def _change_members(resource: Object, path: Path, name: str, value: Any) -> None:
    members = _mappings(resource, "members")
    if path.sub or len(path.parts) > 1:
        raise ScimError(400, "members: a part of a membership cannot be changed", "mutability")
    if path.element:
        if name != "remove":
            raise ScimError(400, f"members[...]: {name} has no meaning; add the member", "invalidPath")
        resource["members"] = [item for item in members if not path.element(item)]
        return
    given = {text(item, "value"): item for item in _mappings({"members": value}, "members")}
    if name == "remove":
        # Entra lists the members to remove beside the path; without a list all go.
        resource["members"] = [item for item in members if given and item["value"] not in given]
    else:
        by_value = {item["value"]: item for item in members} if name == "add" else {}
        resource["members"] = [*(by_value | given).values()]
