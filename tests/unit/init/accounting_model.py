"""A model of slurmdbd for the tests of accounts as code: what sacctmgr 24.11 and 26.05 were seen to do."""

from __future__ import annotations

from dataclasses import replace

from init.accounts.model import (
    COORDINATOR,
    DEFAULT,
    Database,
    ObjectKey,
    StoredObject,
    account,
    drop_inherited,
    qos,
    read_mark,
    user,
)
from init.accounts.plan import TRES_LIMITS
from init.accounts.slurmdbd import UNSET

CLUSTER = "minivm"
MARKS = ("comment", "description")
TRES = frozenset({"cpu", "mem", "node", "billing", "gres/gpu"})


class Refused(Exception):
    """sacctmgr ended with an error."""


class Dbd:
    """Objects with fields of text; `perform` takes one call of sacctmgr."""

    def __init__(self) -> None:
        self.objects: dict[ObjectKey, dict[str, str]] = {}
        self.marks: dict[ObjectKey, str] = {}
        self.levels: dict[str, str] = {"root": "administrator"}
        self.defaults: dict[str, str] = {"root": "root"}
        self.rows: dict[str, dict[str, str]] = {"root": {}}
        self.objects[account("root")] = {"fairshare": "1"}
        self.objects[user("root", "root")] = {"fairshare": "1"}
        self.objects[qos("normal")] = {"priority": "0"}

    def read(self) -> Database:
        objects = {}
        for key, own in self.objects.items():
            fields = dict(own)
            if key.account:
                if self.defaults.get(key.name) == key.account:
                    fields[DEFAULT] = "yes"
                if self.levels.get(key.name):
                    fields["adminlevel"] = self.levels[key.name]
            elif key.kind == "account":
                fields |= self.rows[key.name] | self._inherited(key.name)
            objects[key] = StoredObject(fields, read_mark(CLUSTER, self.marks.get(key, "")))
        shown = {key.name: found.fields for key, found in objects.items() if key.kind == "account"}
        for name in shown:
            objects[account(name)] = replace(objects[account(name)], fields=drop_inherited(shown, name))
        return Database(objects, dict(self.levels), frozenset(self.rows), TRES)

    def _inherited(self, name: str) -> dict[str, str]:
        parent = self.objects[account(name)].get("parent", "")
        if not parent:
            return {}
        own = {field: "yes" for field in self.rows[parent] if field.startswith(COORDINATOR)}
        return own | self._inherited(parent)

    def perform(self, argv: tuple[str, ...]) -> None:
        word, kind, *rest = argv
        where = dict(part.split("=", 1) for part in rest[: rest.index("set") if "set" in rest else None] if "=" in part)
        settings = dict(part.split("=", 1) for part in rest[rest.index("set") + 1 :]) if "set" in rest else where
        names = where.get("name", where.get("names", "")).split(",")
        if kind == "coordinator":
            row = self.rows[where["account"]]
            for name in names:
                assert name in self.levels
                row[f"{COORDINATOR}{name}"] = "yes"
                if word == "delete":
                    del row[f"{COORDINATOR}{name}"]
        elif kind == "user":
            self._user(word, names, where, settings)
        else:
            for name in names:
                self._plain(word, qos(name) if kind == "qos" else account(name), settings)

    def _plain(self, word: str, key: ObjectKey, settings: dict[str, str]) -> None:
        if word == "delete":
            holds = [other for other in self.objects if other.account == key.name and key.kind == "account"]
            holds += [other for other, fields in self.objects.items() if fields.get("parent") == key.name]
            if key.kind != "qos":
                assert not holds, f"{key} still holds {holds}"
            del self.objects[key]
            self.marks.pop(key, None)
            return
        if word == "add":
            assert key not in self.objects
            self.objects[key] = {"fairshare": "1"} if key.kind == "account" else {"priority": "0"}
        if key.kind == "account":
            has_row = key.name in self.rows
            row = self.rows.setdefault(key.name, {})
            if not has_row or word == "modify":
                row |= {name: settings[name] for name in ("description", "organization") if name in settings}
        assert settings.get("parent", "root") in self.rows
        self._set(key, settings)

    def _user(self, word: str, names: list[str], where: dict[str, str], settings: dict[str, str]) -> None:
        for name in names:
            accounts = where.get("account", "").split(",") if "account" in where else []
            if word == "delete":
                rest = {key.account for key in self.objects if key.account and key.name == name} - set(accounts)
                if self.defaults.get(name) in accounts and rest:
                    raise Refused("You can not remove the default account of a user")
                for of in accounts:
                    del self.objects[user(name, of)]
                    self.marks.pop(user(name, of), None)
                if not rest:
                    self.levels.pop(name)
                    self.defaults.pop(name)
                    for row in self.rows.values():
                        row.pop(f"{COORDINATOR}{name}", None)
                continue
            if word == "add":
                (of,) = accounts
                assert account(of) in self.objects
                key = user(name, of)
                assert key not in self.objects
                if name not in self.levels:
                    self.levels[name] = settings.get("adminlevel", "")
                self.defaults.setdefault(name, of)
                self.objects[key] = {"fairshare": "1"}
            elif "adminlevel" in settings:
                self.levels[name] = settings["adminlevel"].replace("none", "")
            if "defaultaccount" in settings:
                assert user(name, settings["defaultaccount"]) in self.objects
                self.defaults[name] = settings["defaultaccount"]
            for of in accounts:
                self._set(user(name, of), settings)

    def _set(self, key: ObjectKey, settings: dict[str, str]) -> None:
        fields = self.objects[key]
        for name, value in settings.items():
            if name == ("description" if key.kind == "qos" else "comment"):
                self.marks[key] = value
            elif name in ("name", "account", "cluster", "defaultaccount", "adminlevel", "description", "organization"):
                continue
            elif name in TRES_LIMITS:
                limits = dict(part.split("=") for part in fields.get(name, "").split(",") if part)
                limits |= dict(part.split("=") for part in value.split(","))
                fields[name] = ",".join(f"{tres}={count}" for tres, count in sorted(limits.items()) if count != "-1")
            else:
                fields[name] = "" if value == "-1" else value
            if not fields.get(name, "") or UNSET.get(name) in (fields.get(name), f"{fields[name]}.000000"):
                fields.pop(name, None)
        levels = fields.get("qos", "")
        if levels and fields.get("defaultqos") and fields["defaultqos"] not in levels.split(","):
            raise Refused("These associations don't have access to their default qos")
