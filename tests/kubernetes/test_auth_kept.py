"""Helm's own install, upgrade and uninstall before a real API server: no upgrade changes a cluster's authentication."""

from __future__ import annotations

import re
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import pytest

from cluster.render import CHART
from tests.helm import helm
from tests.kubernetes import programs
from tests.kubernetes.apiserver import ApiServer, Object, api_server

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if not programs.built() and (why := programs.refusal()):
        pytest.skip(f"no API server: {why}")
    with api_server(programs.build(), tmp_path_factory.mktemp("api")) as server:
        yield server


class Site:
    """One release, in a namespace of its own."""

    def __init__(self, api: ApiServer, name: str) -> None:
        self.api, self.namespace = api, name

    def helm(self, word: str, *words: str, values: Object | None = None) -> None:
        chart = (str(CHART),) if word in ("install", "upgrade") else ()
        helm(self.api.kubeconfig, word, "slurm", *chart, "-n", self.namespace, *words, values=values)

    def uninstall(self) -> None:
        """Uninstall, and complete the hook's Job: no controller runs Jobs before an API server alone."""
        jobs = "/apis/batch/v1/{}/jobs"
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(self.helm, "uninstall")
            while not done.done():
                for item in self.get(jobs)["items"]:
                    where = f"{jobs}/{item['metadata']['name']}/status".format(f"namespaces/{self.namespace}")
                    with suppress(urllib.error.HTTPError):  # Helm has deleted it
                        self.api.merge(where, {"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
                wait([done], timeout=0.2)
            done.result()

    def get(self, where: str) -> Any:
        return self.api.ask("GET", where.format(f"namespaces/{self.namespace}"))

    def auth(self) -> str:
        """Return what slurm.conf says; every StatefulSet agrees."""
        text = self.get("/api/v1/{}/configmaps/slurm-config")["data"]["slurm.conf"]
        (auth,) = re.findall(r"^AuthType=auth/(\w+)$", text, re.MULTILINE)
        for item in self.get("/apis/apps/v1/{}/statefulsets")["items"]:
            (container,) = item["spec"]["template"]["spec"]["containers"]
            env = {one["name"]: one.get("value") for one in container["env"]}
            assert env.get("MINIVM_AUTH", "munge") == auth, item["metadata"]["name"]
        return str(auth)

    def secrets(self) -> set[str]:
        names = {item["metadata"]["name"] for item in self.get("/api/v1/{}/secrets")["items"]}
        return names & {"slurm-munge", "slurm-slurm-key"}


SSSD = {"secrets": {"sssd": {"config": "[sssd]\n"}}}
MUNGE, SLURM = ({**SSSD, "slurm": {"auth": auth}} for auth in ("munge", "slurm"))


@pytest.mark.parametrize("auth", ["slurm", "munge"])
def test_a_release_keeps_its_authentication_through_every_upgrade(api: ApiServer, auth: str) -> None:
    """With default values, with those of the release before, and after an uninstall, which leaves the keys."""
    site = Site(api, f"kept-{auth}")
    site.helm("install", "--create-namespace", values=SSSD if auth == "slurm" else MUNGE)
    assert site.auth() == auth
    key = {"slurm": "slurm-slurm-key", "munge": "slurm-munge"}[auth]
    for words, values in (((), SSSD), (("--reuse-values",), {}), (("--reuse-values",), {"login": {"motd": "new"}})):
        site.helm("upgrade", *words, values=values)
        assert (site.auth(), site.secrets()) == (auth, {key})
    site.uninstall()
    assert site.secrets() == {key}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        site.auth()
    site.helm("install", values=SSSD)
    assert (site.auth(), site.secrets()) == (auth, {key})


def test_only_a_named_value_moves_a_release_and_the_next_upgrade_keeps_that(api: ApiServer) -> None:
    site = Site(api, "moved")
    site.helm("install", "--create-namespace", values=MUNGE)
    site.helm("upgrade", values=SLURM)
    site.helm("upgrade", values=SSSD)
    assert (site.auth(), site.secrets()) == ("slurm", {"slurm-munge", "slurm-slurm-key"})
    site.uninstall()
    with pytest.raises(AssertionError, match="there are keys of munge and of auth/slurm"):
        site.helm("install", values=SSSD)
    site.helm("install", values=SLURM)
    assert site.auth() == "slurm"
