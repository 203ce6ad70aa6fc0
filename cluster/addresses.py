"""The addresses of a cluster's pods on one machine: Services keep theirs, and no new pod gets that of an earlier one.

docker has no Services: a pod behind a Service with an address of its own gets that address, and pods find the others in
their hosts files (`hosts`) or by docker's aliases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cluster import manifests, names
from cluster.manifests import Manifests, PodSpec
from cluster.pods import Kubelet, write_private

DIRECTORY = "demo"


class Addresses:
    def __init__(self, kubelet: Kubelet, state: Path) -> None:
        self.kubelet, self.state = kubelet, state

    def assign(self, pods: Sequence[PodSpec], desired: Manifests) -> dict[str, str]:
        """Map these pods, which start now, and every pod behind a Service to an address."""
        kept = self._kept(desired)
        without_service = [pod.name for pod in pods if pod.name not in kept]
        reserved = [*kept.values(), *self._moving(desired).values()]
        return kept | dict(zip(without_service, self._new(len(without_service), reserved), strict=True))

    def hosts(self, pod: PodSpec, desired: Manifests, assigned: Mapping[str, str]) -> dict[str, str]:
        """Map the names of the Services that the pod must resolve by its hosts file to their addresses."""
        stable = manifests.stable_services(desired.pods, desired.services)
        addresses = self._moving(desired) | {service.name: assigned[name] for name, service in stable.items()}
        return {
            name: address for service, address in addresses.items()
            for name in manifests.host_names(service, pod.namespace)
        }  # fmt: skip

    def _of_services(self, desired: Manifests) -> dict[str, str]:
        """Map every Service with an address of its own to it."""
        subnet = self.kubelet.ensure_network()["IPAM"]["Config"][0]["Subnet"]
        stable = manifests.stable_services(desired.pods, desired.services).values()
        moving = manifests.moving_services(desired.services)
        return names.service_addresses(subnet, {service.name for service in (*stable, *moving)})

    def _kept(self, desired: Manifests) -> dict[str, str]:
        """Map pods to the address of the Service in front of them, which outlives the pod.

        The directory's pod too: docker's DNS gives names a lifetime of ten minutes, and sssd uses the old address so
        long. Every pod without a cache would know no user meanwhile.
        """
        by_service = self._of_services(desired)
        stable = manifests.stable_services(desired.pods, desired.services)
        kept = {pod: by_service[service.name] for pod, service in stable.items()}
        subnet = self.kubelet.ensure_network()["IPAM"]["Config"][0]["Subnet"]
        for pod in desired.pods:
            address = names.service_addresses(subnet, [pod.subdomain])[pod.subdomain]
            if pod.role == DIRECTORY and address not in by_service.values():
                kept[pod.name] = address
        return kept

    def _moving(self, desired: Manifests) -> dict[str, str]:
        """Map Services to the address that the active one of several pods takes."""
        by_service = self._of_services(desired)
        return {service.name: by_service[service.name] for service in manifests.moving_services(desired.services)}

    def _new(self, count: int, reserved: Iterable[str]) -> list[str]:
        """Return addresses that neither present nor previous pods have, so that no peer reaches a wrong pod."""
        if not count:
            return []
        network = self.kubelet.ensure_network()
        config = network["IPAM"]["Config"][0]
        last_file = self.state / "last-address"
        # Includes containers that a person attached to the network, such as a database.
        used = [str(item["IPv4Address"]).partition("/")[0] for item in network["Containers"].values()]
        used += reserved
        last = last_file.read_text() if last_file.exists() else ""
        allocated = names.allocate(config["Subnet"], gateway=config["Gateway"], used=used, last=last, count=count)
        write_private(last_file, allocated[-1].encode())
        return allocated
