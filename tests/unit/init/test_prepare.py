"""Preparation steps on a scratch root: the files that they write, and the input that they accept and refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from init.errors import ConfigError
from init.plan.service import STEPS
from init.pod import pod
from init.pod.pod import Pod, PrepareError, write
from init.prepare import boot, cgroups, database, node, secrets, slurm_config
from init.prepare.__main__ import EX_CONFIG, main
from init.slurm import accounting, files

ROOT = Path(__file__).resolve().parents[3]
ME = (os.getuid(), os.getgid())


PASSWD = "root:x:0:0:root:/root:/bin/bash\nslurm:x:64030:64030::/var/lib/slurm:/usr/sbin/nologin\nada:x:500:500::/:\n"


@pytest.fixture
def numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of an image whose user slurm is its own number."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(PASSWD)
    (tmp_path / "etc/group").write_text("root:x:0:\nslurm:x:64030:ada\nlab:x:500:\n")
    (tmp_path / "var/lib/slurm/slurmd").mkdir(parents=True)
    os.chown(tmp_path / "var/lib/slurm/slurmd", 64030, 64030)
    (tmp_path / "var/lib/slurm/other").touch()
    monkeypatch.setattr(boot, "user", lambda name: (64030, 64030))
    return tmp_path


@pytest.mark.skipif(os.geteuid() != 0, reason="it gives files to others")
def test_the_user_slurm_gets_the_number_of_the_cluster(numbered: Path) -> None:
    def told(uid: str) -> str:
        return boot.number_users(Pod({"MINIVM_SLURM_UID": uid}, numbered))

    assert told("") == "as in the image"
    assert (numbered / "etc/passwd").read_text() == PASSWD
    assert told("401") == "slurm is 401, was 64030"
    assert (numbered / "etc/passwd").read_text() == PASSWD.replace("64030:64030", "401:401")
    assert (numbered / "etc/group").read_text() == "root:x:0:\nslurm:x:401:ada\nlab:x:500:\n"
    owned = [(numbered / "var/lib/slurm" / name).stat().st_uid for name in ("slurmd", "other")]
    assert owned == [401, 0]


@pytest.mark.parametrize(("uid", "why"), [("500", "500 is"), ("0", "expected 1 to 59999"), ("x", "expected 1 to")])
def test_a_number_that_slurm_cannot_have_is_refused(numbered: Path, uid: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        boot.number_users(Pod({"MINIVM_SLURM_UID": uid}, numbered))
    assert (numbered / "etc/passwd").read_text() == PASSWD


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the lookup of the image's users, which do not exist on every machine that runs the tests."""
    for module in (secrets, database, files):
        monkeypatch.setattr(module, "user", lambda name: ME)


def scratch(root: Path, files: dict[str, str], **env: str) -> Pod:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("etc/munge", "etc/slurm", "etc/sssd", "run/minivm/env", "etc/pam.d", "etc/profile.d"):
        (root / name).mkdir(parents=True, exist_ok=True)
    return Pod(env, root)


def test_a_file_is_born_with_its_mode_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert write(path, b"one", mode=0o400)
    assert path.stat().st_mode & 0o7777 == 0o400
    before = path.stat().st_ino
    assert not write(path, b"one", mode=0o400), "what is right is not touched"
    assert path.stat().st_ino == before
    assert write(path, b"two", mode=0o400) and path.read_bytes() == b"two"
    assert [item.name for item in tmp_path.iterdir()] == ["key"], "no temporary is left"


def test_a_symlink_in_the_place_of_a_secret_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("theirs")
    (tmp_path / "key").symlink_to(elsewhere)
    write(tmp_path / "key", b"ours", mode=0o400)
    assert elsewhere.read_text() == "theirs" and not (tmp_path / "key").is_symlink()


def test_the_munge_key_is_installed_from_its_mount(tmp_path: Path, users: None) -> None:
    found = scratch(tmp_path, {"/mnt/minivm/secrets/munge/munge.key": "k" * 128})
    secrets.munge(found)
    key = tmp_path / "etc/munge/munge.key"
    assert key.read_text() == "k" * 128 and key.stat().st_mode & 0o777 == 0o400


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (dict[str, str](), "munge.key is missing"),
        ({"/mnt/minivm/secrets/munge/munge.key": "short"}, "has 5 bytes"),
        ({"/mnt/minivm/secrets/munge/munge.key": "k" * 2000}, "has 2000 bytes"),
    ],
)
def test_a_munge_key_that_cannot_be_one_is_named(tmp_path: Path, users: None, files: dict[str, str], why: str) -> None:
    with pytest.raises(PrepareError, match=why):
        secrets.munge(scratch(tmp_path, files))


SLURM_KEY, SLURM_JWKS = (f"/mnt/minivm/secrets/slurm-key/slurm.{kind}" for kind in ("key", "jwks"))


def jwk(**more: object) -> dict[str, object]:
    return {"kid": "a", "kty": "oct", "alg": "HS256", "k": "A" * 48, **more}


def jwks(*keys: object) -> str:
    return json.dumps({"keys": keys})


def test_slurms_key_is_installed_for_its_daemons_alone(tmp_path: Path, users: None) -> None:
    secrets.slurm_key(scratch(tmp_path, {SLURM_KEY: "k" * 128}))
    key = tmp_path / "etc/slurm/slurm.key"
    assert key.read_text() == "k" * 128 and key.stat().st_mode & 0o777 == 0o400
    assert "SLURM_SACK_JWKS=/etc/slurm/slurm.jwks" in (tmp_path / "run/minivm/env/auth").read_text()


def test_several_keys_come_from_either_mount_and_go_with_it(tmp_path: Path, users: None) -> None:
    text = jwks(jwk(use="default"), jwk(kid="b", k="-_" * 24))
    beside = SLURM_JWKS.replace("/slurm-key/", "/slurm-jwks/")
    found, target = scratch(tmp_path, {SLURM_KEY: "k" * 128, beside: text}), tmp_path / "etc/slurm/slurm.jwks"
    assert "scontrol reconfigure" in secrets.slurm_key(found)
    assert target.read_text() == text and target.stat().st_mode & 0o777 == 0o400
    assert "scontrol reconfigure" not in secrets.slurm_key(found)
    found.path(beside).unlink()
    assert "scontrol reconfigure" in secrets.slurm_key(found)
    assert not target.exists() and (tmp_path / "etc/slurm/slurm.key").exists()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (dict[str, str](), "neither slurm.key nor slurm.jwks"),
        ({SLURM_KEY: "short"}, "has 5 bytes"),
        ({SLURM_KEY: "k" * 4097}, "has 4097 bytes"),
        ({SLURM_JWKS: "[]"}, "not JSON"),
        ({SLURM_JWKS: "["}, "not JSON"),
        ({SLURM_JWKS: jwks()}, "not a list of keys"),
        ({SLURM_JWKS: jwks("a")}, "not a list of keys"),
        ({SLURM_JWKS: jwks(jwk(kid=None))}, '"kid" of its own'),
        ({SLURM_JWKS: jwks(jwk(), jwk())}, '"kid" of its own'),
        ({SLURM_JWKS: jwks(jwk(alg="none"))}, '"alg": "HS256"'),
        ({SLURM_JWKS: jwks(jwk(k="AAAA"))}, "32 to 4096 bytes"),
        ({SLURM_JWKS: jwks(jwk(k="!" * 48))}, "32 to 4096 bytes"),
        ({SLURM_JWKS: jwks(jwk(exp="soon"))}, '"exp" of key a'),
        ({SLURM_JWKS: jwks(jwk(use="default"), jwk(kid="b", use="default"))}, "more than one key is the default"),
    ],
)
def test_keys_on_which_slurms_daemons_would_end_are_refused(
    tmp_path: Path, users: None, files: dict[str, str], why: str
) -> None:
    with pytest.raises(PrepareError, match=why):
        secrets.slurm_key(scratch(tmp_path, files))
    assert not [*(tmp_path / "etc/slurm").iterdir()], "what the daemons have stays"


def test_sssd_conf_is_installed_for_root_alone_and_one_that_has_gone_is_told(tmp_path: Path) -> None:
    found = scratch(tmp_path, {"/mnt/minivm/secrets/sssd/sssd.conf": "[sssd]"})
    secrets.sssd(found)
    assert (tmp_path / "etc/sssd/sssd.conf").stat().st_mode & 0o777 == 0o600
    (tmp_path / "mnt/minivm/secrets/sssd/sssd.conf").unlink()
    with pytest.raises(PrepareError, match=r"sssd\.conf is missing"):
        secrets.sssd(found)


LOOK_UP = "pam_initgroups_scheme"


def test_sssd_is_not_left_to_look_at_every_process_unless_the_site_says_how(tmp_path: Path) -> None:
    mounted, ours = "mnt/minivm/secrets/sssd/sssd.conf", tmp_path / "etc/sssd/conf.d/00-minivm.conf"
    found = scratch(tmp_path, {mounted: "[pam]\n# pam_initgroups_scheme = never\n", "etc/sssd/conf.d/README": ""})
    assert secrets.sssd(found) == "sssd.conf installed"
    assert LOOK_UP in ours.read_text() and ours.stat().st_mode & 0o777 == 0o600
    (tmp_path / mounted).write_text("[pam]\npam_initgroups_scheme=no_session\n")
    secrets.sssd(found)
    assert LOOK_UP not in ours.read_text()


def test_sssd_takes_more_idle_connections_than_one_user_has_unless_the_site_says_how_many(tmp_path: Path) -> None:
    mounted, ours = "mnt/minivm/secrets/sssd/sssd.conf", tmp_path / "etc/sssd/conf.d/00-minivm.conf"
    found = scratch(tmp_path, {mounted: "[nss]\nfd_limit = 9000\n", "etc/sssd/conf.d/README": ""})
    secrets.sssd(found)
    written = ConfigParser()
    written.read(ours)
    assert dict(written["nss"]) == {"client_idle_timeout": "10"}
    assert written["pam"]["fd_limit"] == written["ssh"]["fd_limit"] == "65536"


@pytest.mark.parametrize("name", ["00-aaa.conf", "zz.conf"])
def test_a_site_s_own_word_to_sssd_counts_whatever_its_file_is_called(name: str, tmp_path: Path) -> None:
    """A site's own sssd setting wins for any file name.

    sssd reads that directory in the sort order of its locale, and the last setting wins.
    """
    mounted, ours = "mnt/minivm/secrets/sssd/sssd.conf", tmp_path / "etc/sssd/conf.d/00-minivm.conf"
    found = scratch(tmp_path, {mounted: "[sssd]", f"etc/sssd/conf.d/{name}": "[pam]\n PAM_initgroups_scheme = never\n"})
    ours.write_text("[pam]\npam_initgroups_scheme = always\n")  # from an earlier start
    assert secrets.sssd(found) == "sssd.conf installed" and LOOK_UP not in ours.read_text()
    # Files that sssd does not read contain no setting of the site.
    for old, new in ((name, f".{name}"), (f".{name}", f"{name}.old")):
        (ours.parent / old).rename(ours.parent / new)
        secrets.sssd(found)
        assert LOOK_UP in ours.read_text()


# tests/container/images/test_login.py has sssd 2.10's own behaviour for each of these.
READ = ("[pam]\nNAME = x\n", "[ PAM ]\n  name=x", "# [\n; ]\n[nss]\na=1\n\n[pam]\r\nNAME = x\r\n")
ELSEWHERE = ("NAME = x\n", "[pam]\n[domain/x]\nNAME = x\n", "[pam]\n#NAME = x\nNAMES = x\n")
PASSED_OVER = (
    "NAME = x\nhello\n",
    "NAME = x\n = 3\n",
    "NAME = x\n[nss] x\n",
    "NAME = x\n[]\n",
    "NAME = x\n [nss]\n",
    "NAME = \xff\n",
)


@pytest.mark.parametrize("text", [*READ, *ELSEWHERE, *(f"[pam]\n{text}" for text in PASSED_OVER)])
def test_a_word_that_sssd_does_not_read_is_none(text: str, tmp_path: Path) -> None:
    mounted, ours = "mnt/minivm/secrets/sssd/sssd.conf", tmp_path / "etc/sssd/conf.d/00-minivm.conf"
    found = scratch(tmp_path, {mounted: "[sssd]", "etc/sssd/conf.d/site.conf": ""})
    said = text.replace("NAME", "PAM_initgroups_scheme").replace("name", "pam_initgroups_scheme")
    (ours.parent / "site.conf").write_text(said, encoding="latin-1", newline="")
    secrets.sssd(found)
    assert (LOOK_UP in ours.read_text()) is (text not in READ)


def test_without_a_place_for_it_sssd_starts_all_the_same(tmp_path: Path) -> None:
    found = scratch(tmp_path, {"/mnt/minivm/secrets/sssd/sssd.conf": "[sssd]"})
    assert "is read-only" in secrets.sssd(found) and (tmp_path / "etc/sssd/sssd.conf").exists()


def test_the_controller_has_the_mounted_configuration_or_its_own(tmp_path: Path, users: None) -> None:
    found = scratch(tmp_path, {}, MINIVM_CLUSTER="site", MINIVM_ACCOUNTING="none", MINIVM_CONTROLLER="ctl:7000")
    slurm_config.run(found)
    text = (tmp_path / "etc/slurm/slurm.conf").read_text()
    host = os.uname().nodename.split(".")[0]
    assert "ClusterName=site\n" in text and f"SlurmctldHost={host}(ctl)\n" in text
    assert "enable_configless" in text and "AccountingStorage" not in text
    mounted = {"slurm.conf": "A", "cgroup.conf": "B", "job_submit.lua": "C", "slurmdbd.conf": "D", "..data": "no"}
    found = scratch(tmp_path, {f"/mnt/minivm/config/slurm/{name}": text for name, text in mounted.items()})
    slurm_config.run(found)
    installed = {path.name: path for path in (tmp_path / "etc/slurm").iterdir()}
    assert installed["slurm.conf"].read_text() == "A" and installed["job_submit.lua"].read_text() == "C"
    assert installed["slurmdbd.conf"].stat().st_mode & 0o777 == 0o600 and "..data" not in installed


HOSTS = "# managed\n127.0.0.1\tlocalhost\n10.1.2.3\tslurm-controller-0.slurm-controller\tslurm-controller-0\n"
OWN = "10.1.2.3\tslurm-slurmctld\n"


@pytest.mark.parametrize(
    ("controller", "before", "after"),
    [
        ("slurm-slurmctld", HOSTS, HOSTS + OWN),
        ("slurm-slurmctld:6817", HOSTS, HOSTS + OWN),
        ("slurm-slurmctld", HOSTS + OWN, HOSTS + OWN),
        # The address of the previous pod, or of a Service.
        ("slurm-slurmctld", "10.9.9.9 slurm-slurmctld # old\n" + HOSTS, HOSTS + OWN),
        ("slurm-slurmctld", "# slurm-slurmctld\n", "# slurm-slurmctld\n" + OWN),
        # No name to write: an address, or no setting.
        ("10.96.0.7", HOSTS, HOSTS),
        ("[fd00::7]:6817", HOSTS, HOSTS),
        ("", HOSTS, HOSTS),
    ],
)
def test_in_its_own_pod_the_controllers_name_is_the_pods_address(
    controller: str, before: str, after: str, tmp_path: Path, users: None
) -> None:
    """The controller's own pod resolves the controller's name to its own address.

    Through a Service a pod reaches itself only in some networks, and with another source address.
    """
    found = scratch(tmp_path, {"/etc/hosts": before}, MINIVM_CONTROLLER=controller, MINIVM_POD_IP="10.1.2.3")
    inode = (tmp_path / "etc/hosts").stat().st_ino
    slurm_config.run(found)
    assert (tmp_path / "etc/hosts").read_text() == after
    assert (tmp_path / "etc/hosts").stat().st_ino == inode, "the file is a mount"


@pytest.mark.parametrize(
    ("env", "password", "lines"),
    [
        ({}, "", ["StorageHost=localhost", "StorageUser=slurm"]),
        (
            {"MINIVM_ACCOUNTING": "external", "MINIVM_DATABASE_HOST": "db.site:3307", "MINIVM_DATABASE_USER": "acct"},
            "s3cret\n",
            ["StorageHost=db.site", "StoragePort=3307", "StorageUser=acct", "StoragePass=s3cret"],
        ),
        (
            {"MINIVM_ACCOUNTING": "external", "MINIVM_DATABASE_HOST": "db", "MINIVM_DATABASE_PORT": "3308"},
            "x",
            ["StorageHost=db", "StoragePort=3308"],
        ),
        (
            {"MINIVM_ACCOUNTING": "external", "MINIVM_DATABASE_HOST": "db"},
            "o#ne tw\\o",
            ['StoragePass="o\\#ne tw\\\\o"'],
        ),
    ],
)
def test_slurmdbd_conf_is_private_and_fits_the_database(
    tmp_path: Path, users: None, env: dict[str, str], password: str, lines: list[str]
) -> None:
    files = {"/mnt/minivm/secrets/slurmdbd/password": password} if password else {}
    database.slurmdbd(scratch(tmp_path, files, **env))
    path = tmp_path / "etc/slurm/slurmdbd.conf"
    assert path.stat().st_mode & 0o777 == 0o600
    assert set(lines) <= set(path.read_text().splitlines())


def test_an_external_database_without_its_settings_is_refused(tmp_path: Path, users: None) -> None:
    with pytest.raises(ConfigError, match="MINIVM_DATABASE_HOST"):
        database.slurmdbd(scratch(tmp_path, {}, MINIVM_ACCOUNTING="external"))
    with pytest.raises(PrepareError, match="password is missing"):
        database.slurmdbd(scratch(tmp_path, {}, MINIVM_ACCOUNTING="external", MINIVM_DATABASE_HOST="db"))


def test_an_existing_database_is_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "user", lambda name: ME)
    found = scratch(tmp_path, {"/var/lib/mysql/ib_logfile0": "theirs", "/usr/share/minivm/mysql/ibdata1": "template"})
    assert "is there" in database.mariadb(found)
    assert [path.name for path in (tmp_path / "var/lib/mysql").iterdir()] == ["ib_logfile0"]


def test_a_copy_that_was_cut_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "user", lambda name: ME)
    found = scratch(
        tmp_path,
        {
            "/var/lib/mysql/.minivm-copying": "",
            "/var/lib/mysql/ib_logfile0": "half",
            "/usr/share/minivm/mysql/ib_logfile0": "whole",
            "/usr/share/minivm/mysql/mysql/user.frm": "whole",
        },
    )
    assert "copied from the image" in database.mariadb(found)
    data = tmp_path / "var/lib/mysql"
    assert (data / "ib_logfile0").read_text() == "whole" and (data / "mysql/user.frm").exists()
    assert not (data / ".minivm-copying").exists() and "is there" in database.mariadb(found)


V2 = "/sys/fs/cgroup/"
V1_CPU, V1_MEMORY = "/sys/fs/cgroup/cpu/cpu.cfs_", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


@pytest.mark.parametrize(
    ("files", "cpu", "memory"),
    [
        ({f"{V2}cpu.max": "max 100000\n", f"{V2}memory.max": "max\n"}, None, None),
        ({f"{V2}cpu.max": "350000 100000\n", f"{V2}memory.max": "1073741824\n"}, 3.5, 1 << 30),
        (
            {f"{V1_CPU}quota_us": "-1\n", f"{V1_CPU}period_us": "100000\n", V1_MEMORY: "9223372036854771712\n"},
            None,
            None,
        ),
        ({f"{V1_CPU}quota_us": "200000\n", f"{V1_CPU}period_us": "100000\n", V1_MEMORY: "2147483648\n"}, 2.0, 2 << 30),
        (dict[str, str](), None, None),
    ],
)
def test_the_limits_of_the_pod_are_read(
    tmp_path: Path, files: dict[str, str], cpu: float | None, memory: int | None
) -> None:
    found = scratch(tmp_path, files)
    assert cgroups.cpu_limit(found) == cpu
    assert cgroups.memory_limit(found) == memory


@pytest.mark.parametrize(
    ("cores", "threads", "cpu", "limit_gib", "expected"),
    [
        (64, 128, None, None, {}),
        (64, 128, 128.0, 1024, {}),  # the limit is the whole machine
        (64, 128, 64.0, 512, {"CoreSpecCount": "32", "MemSpecLimit": str(512 * 1024)}),
        (64, 64, 15.5, None, {"CoreSpecCount": "49"}),
        (64, 128, 0.5, None, {"CoreSpecCount": "63"}),  # at least one core
        (2, 2, 8.0, None, {}),
    ],
)
def test_what_is_not_ours_is_kept_from_jobs(
    cores: int, threads: int, cpu: float | None, limit_gib: int | None, expected: dict[str, str]
) -> None:
    limit = None if limit_gib is None else limit_gib << 30
    assert cgroups.configuration(cores, threads, 1024 * 1024, cpu, limit) == expected


def test_cores_are_counted_by_package_and_offline_ones_are_not(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    for cpu, (package, core) in enumerate([(0, 0), (0, 0), (0, 1), (1, 0)]):
        base = f"/sys/devices/system/cpu/cpu{cpu}"
        files |= {f"{base}/topology/physical_package_id": f"{package}\n", f"{base}/topology/core_id": f"{core}\n"}
    files["/sys/devices/system/cpu/cpu3/online"] = "0\n"
    assert cgroups.cpus(scratch(tmp_path, files)) == (2, 3)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ""),
        (["NVIDIA H100 80GB HBM3"] * 8, "gpu:nvidia_h100_80gb_hbm3:8"),
        (["NVIDIA A100-SXM4-40GB", "Tesla T4"], "gpu:nvidia_a100-sxm4-40gb:1,gpu:tesla_t4:1"),
        (["", ""], "gpu:2"),
    ],
)
def test_gpus_become_gres_in_slurms_spelling(names: list[str], expected: str) -> None:
    assert node.gres(names) == expected


def test_without_a_driver_the_device_files_are_counted(tmp_path: Path) -> None:
    assert node.gpu_models("libno-such-nvml.so.1") is None
    found = scratch(tmp_path, {"/dev/nvidia0": "", "/dev/nvidia1": "", "/dev/nvidiactl": "", "/dev/nvidia-uvm": ""})
    assert found.gpus == 2


@pytest.mark.parametrize(
    ("features", "override", "expected"),
    [
        ("", "", "Gres=gpu:2 CoreSpecCount=3 Feature=minivm"),
        ("h100, ib", "", "Gres=gpu:2 CoreSpecCount=3 Feature=minivm,h100,ib"),
        ("", "gres=gpu:h100:2 Weight=10", "Gres=gpu:h100:2 CoreSpecCount=3 Feature=minivm Weight=10"),
        ("", "CoreSpecCount=", "Gres=gpu:2 Feature=minivm"),
    ],
)
def test_the_operators_words_win_over_what_was_found(features: str, override: str, expected: str) -> None:
    assert node.node_configuration({"Gres": "gpu:2", "CoreSpecCount": "3"}, features, override) == expected


def test_a_word_that_is_no_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="Weight"):
        node.node_configuration({}, "", "Weight")


def test_users_get_what_is_theirs_and_no_tokens(tmp_path: Path) -> None:
    env = {
        "NCCL_IB_HCA": "mlx5 $(touch x)",
        "MINIVM_USER_TEAM": "blue",
        "KUBERNETES_TOKEN": "secret",
        "MINIVM_CLUSTER": "c",
        "TZ": "Europe/Paris",
    }
    boot.write_profile(scratch(tmp_path, {}, **env))
    script = tmp_path / "run/minivm/profile.sh"
    output = subprocess.run(
        ["/bin/sh", "-c", f". {script}; env"], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}
    ).stdout
    shown = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    assert (shown["NCCL_IB_HCA"], shown["TEAM"], shown["TZ"]) == ("mlx5 $(touch x)", "blue", "Europe/Paris")
    assert "KUBERNETES_TOKEN" not in shown and "MINIVM_CLUSTER" not in shown
    assert (tmp_path / "etc/profile.d/minivm.sh").exists()


def test_stale_files_go_once_in_the_life_of_a_pod(tmp_path: Path) -> None:
    files = {"/run/sssd.pid": "1", "/run/slurm/slurmd.pid": "7", "/proc/1/stat": f"1 (init) S {'0 ' * 18}777 0"}
    found = scratch(tmp_path, files)
    boot.remove_stale(found)
    assert not (tmp_path / "run/sssd.pid").exists() and not (tmp_path / "run/slurm/slurmd.pid").exists()
    (tmp_path / "run/sssd.pid").write_text("8")
    boot.remove_stale(found)
    assert (tmp_path / "run/sssd.pid").exists(), "a living pod's files stay"
    (tmp_path / "proc/1/stat").write_text(f"1 (init) S {'0 ' * 18}999 0")
    boot.remove_stale(found)
    assert not (tmp_path / "run/sssd.pid").exists(), "the same container, started again"


def test_cgroup_v2_moves_what_runs_out_of_the_way(tmp_path: Path) -> None:
    found = scratch(
        tmp_path,
        {
            f"{V2}cgroup.controllers": "cpu memory\n",
            f"{V2}cgroup.procs": "1\n",
            f"{V2}cgroup.subtree_control": "",
            f"{V2}minivm/cgroup.procs": "",
        },
    )
    text = cgroups.run(found)
    assert "delegated: cpu memory" in text
    assert (tmp_path / "sys/fs/cgroup/minivm/cgroup.procs").read_text() == "1"
    assert (tmp_path / "run/minivm/env/cgroup").read_text() == "MINIVM_CGROUP=v2\n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ("slurm-controller", 6817)),
        ("ctl", ("ctl", 6817)),
        ("ctl:7001", ("ctl", 7001)),
        ("::1", ("::1", 6817)),
        ("[::1]:9", ("::1", 9)),
    ],
)
def test_the_controllers_address(value: str, expected: tuple[str, int]) -> None:
    assert Pod({"MINIVM_CONTROLLER": value} if value else {}).controller == expected


def test_a_choice_is_checked() -> None:
    with pytest.raises(ConfigError, match="embeded") as caught:
        Pod({"MINIVM_ACCOUNTING": "embeded"}).choice("MINIVM_ACCOUNTING", "embedded", ["embedded", "none"])
    assert "did you mean embedded?" in caught.value.hint


def test_an_unknown_step_is_a_mistake_of_the_service_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["muge-key"]) == EX_CONFIG
    assert "did you mean munge-key?" in capsys.readouterr().out


def test_steps_load_the_standard_library_only() -> None:
    """Steps import the standard library only: each is a short child process, and its imports delay the boot."""
    modules = sorted({module for module, _ in STEPS.values()})
    code = f"import sys; [__import__('init.prepare.' + m) for m in {modules!r}]; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"yaml", "click", "supervisor", "docker", "asyncio", "http.client"} & set(loaded)


def test_users_are_looked_up_and_a_missing_one_is_named() -> None:
    assert pod.user("root") == (0, 0)
    with pytest.raises(PrepareError, match="no user nobody-has-this-name"):
        pod.user("nobody-has-this-name")


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (0, "", ""),
        (1, "sacctmgr: error: Sending PersistInit msg: Unable to connect to database", "cannot reach its database"),
        (1, "sacctmgr: error: Sending PersistInit msg: Connection refused", "slurmdbd does not answer"),
    ],
)
def test_what_is_told_of_the_accounting_database(code: int, said: str, told: str) -> None:
    assert told in accounting.describe_problem(code, said) and bool(accounting.describe_problem(code, said)) == bool(
        told
    )


PROVEN = '{"release": "24.11", "protocol": 42, "reads": 39, "names": {"42": "24.11"}, "fast-scripts": true}'
UNTRIED = PROVEN.replace("24.11", "25.05").replace(', "fast-scripts": true', "")


@pytest.mark.parametrize(
    ("wish", "slurm", "has_library", "preload", "word"),
    [
        ("", PROVEN, True, "", "off"),
        ("no", PROVEN, True, "", "off"),
        ("yes", PROVEN, True, node.LIBRARY, "slurmd loads"),
        ("yes", PROVEN, False, "", "the image has no"),
        ("yes", UNTRIED, True, "", "Slurm 25.05 was not tested with it"),
        ("yes", '{"release": "27.11"}', True, "", "this Slurm was not tested with it"),
        ("yes", "", True, "", "this Slurm was not tested with it"),
    ],
)
def test_fast_scripts_are_for_a_slurm_that_was_tested_with_them(
    tmp_path: Path, wish: str, slurm: str, has_library: bool, preload: str, word: str
) -> None:
    files = {"usr/share/minivm/slurm.json": slurm} if slurm else {}
    files |= {node.LIBRARY: ""} if has_library else {}
    pod = scratch(tmp_path, files, **({"MINIVM_FAST_SCRIPTS": wish} if wish else {}))
    assert word in node.fast_scripts(pod)
    wanted = f"LD_PRELOAD={preload}\n" if preload else ""
    assert (tmp_path / "run/minivm/env/fast-scripts").read_text() == wanted


def test_a_preload_of_the_pod_stays_beside_fast_scripts(tmp_path: Path) -> None:
    files = {"usr/share/minivm/slurm.json": PROVEN, node.LIBRARY: ""}
    pod = scratch(tmp_path, files, MINIVM_FAST_SCRIPTS="yes", LD_PRELOAD="/opt/site.so")
    node.fast_scripts(pod)
    text = (tmp_path / "run/minivm/env/fast-scripts").read_text()
    assert text == f"LD_PRELOAD={node.LIBRARY}:/opt/site.so\n"


def test_fast_scripts_are_proven_with_these_releases() -> None:
    """Only tested releases use fast scripts.

    tests/cluster/test_jobs.py runs with the library; a release is added here once its images passed that test.
    """
    facts = yaml.safe_load((ROOT / "images/slurm.yaml").read_text())["releases"]
    assert {name for name, of in facts.items() if of.get("fast-scripts")} == {"24.11", "26.05"}
