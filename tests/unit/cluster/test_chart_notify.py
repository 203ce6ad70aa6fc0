"""Notifications in the chart: off by default, secrets in a Secret alone, and what would send nothing is refused."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from cluster import ClusterError
from cluster.pods import Kubelet, description
from cluster.values import Options
from health.notify.settings import Allowed, load, read_allowed_for_users
from tests.support.rendered_chart import local, render

MAIL = {
    "relay": "starttls://mail.example.org:587",
    "from": "slurm@example.org",
    "user": "u",
    "password": "p-word",
    "domains": ["x.org"],
}
HOOK = {"format": "slack", "url": "https://hooks.example.org/T0K3N"}
OF_USERS = ["https://hooks.slack.com/services/", "http://chat.example.org:8065/hooks/"]
ON = {"mail": MAIL, "webhook": HOOK, "ca": "PEM\n", "perUser": 7}


def objects(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    found = render(values, release="slurm", namespace="hpc")
    return {(item["kind"], item["metadata"]["name"]): item for item in found}


def test_by_default_slurm_sends_nothing_and_says_so() -> None:
    found = objects({})
    config = found["ConfigMap", "slurm-config"]["data"]
    assert "MailProg" not in config["slurm.conf"] and "notify.json" not in config
    assert "mail = false, addresses = false" in config["cli_filter.lua"]
    assert "webhooks" not in config["cli_filter.lua"].split("\n")[0] + config["job_submit.lua"].split("\n")[0]
    assert ("Secret", "slurm-notify") not in found
    assert "notify" not in json.dumps(found["StatefulSet", "slurm-controller"])


def test_the_service_reads_what_the_chart_writes_and_only_the_secret_has_secrets(tmp_path: Path) -> None:
    found = objects({"notifications": ON})
    config = found["ConfigMap", "slurm-config"]["data"]
    assert "MailProg=/usr/libexec/minivm/mail\n" in config["slurm.conf"]
    assert 'mail = true, addresses = true, domains = {"x.org", "example.org"}' in config["cli_filter.lua"]
    secret = found["Secret", "slurm-notify"]["data"]
    (tmp_path / "notify.json").write_text(config["notify.json"])
    for name, text in secret.items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
    settings = load(tmp_path / "notify.json", tmp_path)
    assert settings.mail is not None and settings.webhook is not None
    assert (settings.mail.user, settings.mail.password, settings.webhook.url) == ("u", "p-word", HOOK["url"])
    assert settings.mail.domains == ("x.org",)
    assert (settings.cluster, settings.ca, settings.per_user, settings.total) == ("minivm", "PEM\n", 7, 500)
    rest = json.dumps([item for (kind, _), item in found.items() if kind != "Secret"])
    assert "p-word" not in rest and "T0K3N" not in rest
    mounts = found["StatefulSet", "slurm-controller"]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "notify", "mountPath": "/mnt/minivm/secrets/notify", "readOnly": True} in mounts
    assert {"name": "state", "mountPath": "/var/lib/minivm/notify", "subPath": "notify"} in mounts


def test_a_secret_of_the_site_is_mounted_and_a_relay_without_a_password_needs_none() -> None:
    mail = {"relay": "smtp://mail", "from": "slurm@example.org"}
    found = objects({"notifications": {"existingSecret": "mine", "mail": mail, "webhook": {"format": "teams"}}})
    volumes = found["StatefulSet", "slurm-controller"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "notify", "secret": {"secretName": "mine", "defaultMode": 0o400, "optional": True}} in volumes
    assert ("Secret", "slurm-notify") not in found
    assert json.loads(found["ConfigMap", "slurm-config"]["data"]["notify.json"])["secret"] == "mine"
    found = objects({"notifications": {"mail": mail}})
    volumes = found["StatefulSet", "slurm-controller"]["spec"]["template"]["spec"]["volumes"]
    assert not [volume for volume in volumes if volume["name"] == "notify"]


def test_webhooks_of_users_alone_switch_notifications_on_and_both_filters_know_them(tmp_path: Path) -> None:
    config = objects({"notifications": {"webhook": {"ofUsers": OF_USERS}}, "slurm": {"bringBackJobs": False}})[
        "ConfigMap", "slurm-config"
    ]["data"]
    assert "MailProg=/usr/libexec/minivm/mail\n" in config["slurm.conf"]
    assert "JobSubmitPlugins=lua\n" in config["slurm.conf"] and "webhooks = true" in config["job_submit.lua"]
    (tmp_path / "notify.json").write_text(config["notify.json"])
    settings = load(tmp_path / "notify.json", tmp_path)
    assert settings.channels() == ("own",) and settings.of_users == tuple(OF_USERS)
    (tmp_path / "cli_filter.lua").write_text(config["cli_filter.lua"])
    assert read_allowed_for_users((tmp_path / "cli_filter.lua",)) == Allowed((), tuple(OF_USERS))
    config = objects({"notifications": ON})["ConfigMap", "slurm-config"]["data"]
    (tmp_path / "cli_filter.lua").write_text(config["cli_filter.lua"])
    assert read_allowed_for_users((tmp_path / "cli_filter.lua",)) == Allowed(("x.org", "example.org"), ())


def test_no_network_policy_keeps_the_controller_from_the_relay() -> None:
    deny = {"egressDeny": ["10.0.0.0/8"]}
    for (kind, _), item in objects({"notifications": ON, "networkPolicy": deny}).items():
        if kind == "NetworkPolicy" and "Egress" in item["spec"]["policyTypes"]:
            (roles,) = item["spec"]["podSelector"]["matchExpressions"]
            assert "controller" not in roles["values"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"notifications": {"mail": {"relay": "smtp://mail"}}}, "notifications.mail.from is empty"),
        ({"notifications": {"mail": {**MAIL, "relay": "smtp://mail"}}}, "readable on the network"),
        ({"notifications": {"webhook": {"format": "json"}}}, "notifications.webhook.url is empty"),
        ({"notifications": {**ON, "existingSecret": "x"}}, "keep them in one place"),
        ({"notifications": ON, "slurm": {"config": {"MailProg": "/bin/mail"}}}, "sets MailProg"),
        ({"notifications": ON, "slurm": {"extraConfig": "mailprog=/bin/mail"}}, "sets MailProg"),
        ({"notifications": {"mail": {**MAIL, "relay": "mail:25"}}}, "relay"),
        ({"notifications": {"mail": {**MAIL, "from": "a@b\nBcc: c"}}}, "from"),
        ({"notifications": {"webhook": {"format": "irc", "url": "https://x"}}}, "format"),
        ({"notifications": {"webhook": {"format": "json", "url": "file:///etc/passwd"}}}, "url"),
        ({"notifications": {"webhook": {"format": "json", "url": "https://x\nfile://y z"}}}, "url"),
        ({"notifications": {"webhook": {"ofUsers": ["https://hooks.slack.com"]}}}, "is not how a URL begins"),
        ({"notifications": {"webhook": {"ofUsers": ['https://x/"}, y = {"']}}}, "is not how a URL begins"),
        (
            {"notifications": {"webhook": {"ofUsers": OF_USERS}}, "slurm": {"files": {"job_submit.lua": "x"}}},
            "empty ofUsers, or remove yours",
        ),
        ({"notifications": {"mail": {**MAIL, "domains": ['x"}, y = {"']}}}, "is no domain"),
        ({"notifications": {"mail": {**MAIL, "domain": "*"}}}, "name one domain"),
    ],
)
def test_what_would_send_nothing_is_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(reason)):
        objects(values)


@pytest.mark.parametrize("on", [{"mail": {"relay": "smtp://mail"}}, {"webhook": {"format": "json"}}])
def test_settings_of_what_is_off_are_refused_once_it_is_on(on: dict[str, Any]) -> None:
    """To switch notifications off, a site empties `relay` and `format`, and need not mend the rest."""
    mail = {"from": "nonsense", "domain": "a b", "domains": ["c d"], "user": "u"}
    off = {"existingSecret": "gone", "mail": mail, "webhook": {"url": "no url"}}
    assert "notify" not in json.dumps(objects({"notifications": off})["StatefulSet", "slurm-controller"])
    with pytest.raises(ClusterError) as caught:
        objects({"notifications": {**off, **{key: off[key] | part for key, part in on.items()}}})
    wanted = ("mail.from is", "no domain") if "mail" in on else ("webhook.url is no URL",)
    assert all(f"notifications.{part}" in str(caught.value) or part in str(caught.value) for part in wanted)
    assert ("webhook.url is no URL" in str(caught.value)) == ("webhook" in on)


def test_a_pod_on_one_machine_starts_without_a_secret_that_need_not_exist(tmp_path: Path) -> None:
    """As on Kubernetes: the service then says which Secret is missing."""
    mail = {"relay": "smtp://mail", "from": "slurm@example.org"}
    desired = local(Options(overrides={"notifications": {"existingSecret": "gone", "mail": mail}}))
    kubelet = Kubelet(None, "x", tmp_path)
    kubelet.publish_files(desired.pod("slurm-controller-0"), desired)
    assert not list((tmp_path / "pods/slurm-controller-0/volumes/notify").glob("[!.]*"))
    assert "optional" not in json.dumps(description(desired.pod("slurm-controller-0"), "")), (
        "older pods would be replaced"
    )
    missing = local(Options(overrides={"secrets": {"jwt": {"existingSecret": "gone"}}}))
    with pytest.raises(ClusterError, match="there is no secret gone\nhint: one machine has those"):
        kubelet.publish_files(missing.pod("slurm-controller-0"), missing)
