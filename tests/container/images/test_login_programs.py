"""The programs that a login runs, as they are compiled for the images, with places and patiences of the test's own."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import testinfra  # type: ignore[import-untyped]  # ships no types
from testinfra.host import Host  # type: ignore[import-untyped]  # ships no types

from tests.cluster.shared_home import SharedHome
from tests.container.conftest import docker, image_of
from tests.container.sssd_stand_in import BODIES, ONE, TWO

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[3]
WHERE, HOME = "/tmp/programs", "/home/nina"
PLACES = {"SSSD": "sssd", "PROGRAM": "program", "ASKED": "asked", "TABLE": "table", "PEOPLE": "people"}
PATIENCE = {"DIRECTORY_PATIENCE": 5, "PATIENCE": 3}
DIRECTORYS = f"{ONE.decode()}\n{TWO.decode()}\n"
PROGRAMS, OWN = "ssh-ed25519 AAAAby-the-program\n", "ssh-ed25519 AAAAhome"
FILES = "ssh-ed25519 AAAAfile"


def compiled_in(host: Host) -> Host:
    container = host.backend.name
    host.check_output(f"rm -rf {WHERE} && mkdir -p {WHERE}")
    docker("cp", str(ROOT / "images/src/login"), f"{container}:{WHERE}/")
    docker("cp", str(ROOT / "tests/container/sssd_stand_in.py"), f"{container}:{WHERE}/")
    settings = [f"-D{name}='\"{WHERE}/{file}\"'" for name, file in PLACES.items()]
    settings += [f"-D{name}={value}" for name, value in PATIENCE.items()]
    flags = f"-std=c17 -O2 -Wall -Wextra -Werror {' '.join(settings)}"
    for program in ("authorized-keys", "admit"):
        host.check_output(f"gcc {flags} -o {WHERE}/{program} {WHERE}/login/{program}.c")
    host.check_output("id nina || useradd --create-home --uid 20001 --shell /bin/bash nina")
    return host


@pytest.fixture(scope="module")
def compiled(idle: Callable[[str], Host]) -> Host:
    return compiled_in(idle("login"))


@pytest.fixture
def login(compiled: Host) -> Iterator[Host]:
    """Prepare a home without keys and sssd's own program, and end any stand-in of sssd afterwards."""
    put(compiled, "program", f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(PROGRAMS.strip())}")
    made = " ".join(f"{WHERE}/{name}" for name in ("sssd", "asked", "table", "users", "people"))
    compiled.check_output(f"rm -rf {made} {HOME}/.ssh; chmod 755 {HOME}")
    yield compiled
    compiled.run("pkill -f '[s]ssd_stand_in.py'")


def put(host: Host, name: str, text: str) -> None:
    host.check_output(f"printf '%s\\n' {shlex.quote(text)} > {WHERE}/{name} && chmod 755 {WHERE}/{name}")


def sssd(host: Host, how: str) -> None:
    host.check_output(
        f"setsid python3 {WHERE}/sssd_stand_in.py {WHERE}/sssd {shlex.quote(how)} > /dev/null 2>&1 < /dev/null &"
        f" until [ -S {WHERE}/sssd ]; do sleep 0.05; done"
    )


def own_keys(host: Host, text: str, name: str = "authorized_keys") -> None:
    """Write keys as nina would write them herself."""
    file = f"{HOME}/.ssh/{name}"
    host.check_output(f"install -d -m 700 -o nina -g nina {HOME}/.ssh && printf %s {shlex.quote(text)} > {file}")
    host.check_output(f"chown nina:nina {file} && chmod 600 {file}")


def keys(host: Host, offered: str = "ssh-ed25519 AAAAoffered") -> tuple[str, str]:
    """Return the program's output for sshd and for the log."""
    done = host.run(f"{WHERE}/authorized-keys nina {HOME} {offered}")
    assert done.rc == 0, done.stderr
    return done.stdout, done.stderr


def test_the_directorys_keys_come_from_sssds_socket_and_no_other_program(login: Host) -> None:
    sssd(login, "two")
    assert keys(login) == (DIRECTORYS, "")


def test_of_a_person_of_the_file_no_directory_is_asked(login: Host) -> None:
    """A name that both have is the file's person: the directory's keys are another person's."""
    own_keys(login, f"{OWN}\n")
    sssd(login, "two")
    login.check_output(f"mkdir {WHERE}/people && echo '{FILES}' > {WHERE}/people/nina")
    assert keys(login) == (f"{FILES}\n{OWN}\n\n", "")
    assert keys(login, FILES)[0] == f"{FILES}\n", "the home is left alone"
    login.check_output(f": > {WHERE}/people/nina")
    assert keys(login) == (f"{OWN}\n\n", ""), "all keys have expired"
    for name in ("../people/nina", "", ".nina", "people/nina", "x" * 5000):
        assert FILES not in login.run(f"{WHERE}/authorized-keys '{name}' {HOME} ssh-rsa AAAA").stdout
    login.check_output(f"rm {WHERE}/people/nina && ln -s /etc/passwd {WHERE}/people/nina")
    assert keys(login)[0].startswith(DIRECTORYS), "a link is no file of keys"


def test_a_home_is_left_alone_where_the_directory_has_the_key_that_is_offered(login: Host) -> None:
    own_keys(login, f"{OWN}\n")
    sssd(login, "two")
    assert keys(login, "ssh-rsa AAAAtwo")[0] == DIRECTORYS
    assert keys(login)[0] == f"{DIRECTORYS}{OWN}\n\n"


def test_of_somebody_without_keys_in_the_directory_the_home_has_them(login: Host) -> None:
    own_keys(login, f"{OWN}\n")
    sssd(login, "none")
    assert keys(login) == (f"{OWN}\n\n", "")


@pytest.mark.parametrize(
    "how",
    [*sorted(set(BODIES) - {"two", "none"}), "another version", "an error", "another command", "an endless answer",
     "a header too short", "the end"],
)  # fmt: skip
def test_an_answer_that_is_not_known_is_left_to_sssds_own_program(login: Host, how: str) -> None:
    sssd(login, how)
    shown, said = keys(login)
    assert shown == PROGRAMS
    assert "is asked for the keys of nina" in said


def test_without_sssds_socket_its_own_program_is_asked(login: Host) -> None:
    assert keys(login)[0] == PROGRAMS


@pytest.mark.parametrize("how", ["silence", "a byte a second"])
def test_a_directory_that_does_not_answer_leaves_the_keys_in_the_home(login: Host, how: str) -> None:
    own_keys(login, f"{OWN}\n")
    sssd(login, how)
    begun = time.monotonic()
    shown, said = keys(login)
    assert shown == f"{OWN}\n\n"
    assert f"has not told the keys of nina within {PATIENCE['DIRECTORY_PATIENCE']} s" in said
    assert time.monotonic() - begun >= PATIENCE["DIRECTORY_PATIENCE"]


def test_a_program_of_sssds_that_hangs_is_ended(login: Host) -> None:
    own_keys(login, f"{OWN}\n")
    put(login, "program", f"#!/bin/sh\necho {PROGRAMS.strip()}\nexec sleep 987654")
    shown, said = keys(login)
    assert shown == f"{OWN}\n\n"
    assert f"within {PATIENCE['DIRECTORY_PATIENCE']} s" in said
    assert login.run("pgrep -f '[s]leep 987654'").stdout == ""


def test_a_file_without_an_end_of_line_does_not_run_into_the_next(login: Host) -> None:
    sssd(login, "none")
    own_keys(login, OWN)
    own_keys(login, "ssh-rsa AAAAhome-two", "authorized_keys2")
    assert keys(login)[0].split("\n") == [OWN, "ssh-rsa AAAAhome-two", ""]


@pytest.mark.parametrize(
    "made",
    [
        "chmod 660 .ssh/authorized_keys",
        "chmod 606 .ssh/authorized_keys",
        "chmod 777 .ssh",
        "chmod 775 .",
        "chown daemon .ssh/authorized_keys",
        "chown daemon .ssh",
        "mv .ssh/authorized_keys /tmp/programs/others; ln -s /tmp/programs/others .ssh/authorized_keys;"
        " chmod 777 /tmp/programs",
        # Root may read it, nina not: what she may not see lets nobody in as her, and is shown to nobody.
        "rm .ssh/authorized_keys; ln -s /etc/shadow .ssh/authorized_keys",
        "chown root .ssh/authorized_keys",
        "rm .ssh/authorized_keys; mkfifo -m 600 .ssh/authorized_keys; chown nina .ssh/authorized_keys",
        "rm .ssh/authorized_keys; mkdir .ssh/authorized_keys",
        "rm .ssh/authorized_keys; ln -s /dev/zero .ssh/authorized_keys",
        "rm .ssh/authorized_keys; ln -s authorized_keys .ssh/authorized_keys",
    ],
)
def test_keys_that_others_may_write_or_that_are_no_file_let_nobody_in(login: Host, made: str) -> None:
    own_keys(login, f"{OWN}\n")
    sssd(login, "two")
    login.check_output(f"cd {HOME} && {made}")
    try:
        assert keys(login)[0] == DIRECTORYS
    finally:
        login.check_output(f"chmod 755 {WHERE}; rm -f {WHERE}/others")


def test_keys_behind_a_link_into_a_strict_place_let_in(login: Host) -> None:
    """Every directory up to the root is checked, as sshd itself does."""
    own_keys(login, f"{OWN}\n")
    sssd(login, "none")
    place = "/home/keys-of-nina"
    login.check_output(
        f"install -d -m 700 -o nina {place} && mv {HOME}/.ssh/authorized_keys {place}/k"
        f" && ln -s {place}/k {HOME}/.ssh/authorized_keys"
    )
    try:
        assert keys(login)[0] == f"{OWN}\n\n"
    finally:
        login.check_output(f"rm -r {place}")


def answers(host: Host) -> tuple[int, str]:
    done = host.run(f"PAM_USER=nina {WHERE}/admit")
    return done.rc, done.stdout


def test_a_home_that_is_there_answers_and_one_that_is_not_too(login: Host) -> None:
    assert answers(login) == (0, "")
    login.check_output(f"mv {HOME} {HOME}.away")
    try:
        assert answers(login) == (0, "")
    finally:
        login.check_output(f"mv {HOME}.away {HOME}")


def test_while_a_question_is_stuck_no_second_one_is_asked(login: Host) -> None:
    """The question is known by its pid and its birth: a process that has the number later is another one."""
    login.check_output(
        f"mkdir -p {WHERE}/asked; setsid sleep 987654 > /dev/null 2>&1 < /dev/null & pid=$!;"
        f' until [ "$(cat /proc/$pid/comm)" = sleep ]; do sleep 0.05; done;'
        f" echo $pid $(cut -d' ' -f22 /proc/$pid/stat) > {WHERE}/asked/nina"
    )
    try:
        code, said = answers(login)
        assert code == 1 and f"Your home {HOME} does not answer" in said
        sssd(login, "none")
        own_keys(login, f"{OWN}\n")
        shown, logged = keys(login)
        assert shown == "" and "does not answer: the keys in it do not count" in logged
        login.check_output(f"sed -i 's/ .*/ 1/' {WHERE}/asked/nina")
        assert answers(login) == (0, "")
    finally:
        login.check_output("pkill -f '[s]leep 987654'")


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[tuple[Host, SharedHome]]:
    """Run a login image whose /home is a file system that can really hang."""
    home = SharedHome(tmp_path)
    container = docker(
        "run", "--detach", "--network", "none", "--volume", f"{home.mount}:/home", "--entrypoint", "/bin/sleep",
        image_of("login"), "infinity",
    )  # fmt: skip
    try:
        yield compiled_in(testinfra.get_host(f"docker://{container}")), home
    finally:
        docker("rm", "--force", container)
        home.close()


# What the one who asks holds, as long as the home hangs.
HELD = f"""PAM_USER=nina {WHERE}/admit > /dev/null &
until question=$(pgrep -P $!) && [ "$(readlink /proc/$question/fd/1)" = "" ]; do :; done
ls /proc/$question/fd; wait"""


def test_a_home_that_hangs_is_told_and_waited_for_no_longer_than_that(hung: tuple[Host, SharedHome]) -> None:
    host, home = hung
    assert answers(host) == (0, "")
    with home.hanging():
        begun = time.monotonic()
        code, said = answers(host)
        assert code == 1 and f"Your home {HOME} does not answer" in said
        assert time.monotonic() - begun >= PATIENCE["PATIENCE"]
        # Who asks may stay in the kernel for long: it must hold nothing that somebody waits for the end of.
        assert host.check_output(f"sh -c {shlex.quote(HELD)}") == "0"
    assert answers(host) == (0, "")


def limits(host: Host, running: str) -> tuple[int, str]:
    """Run a login with this many processes of nina's already there, in a table of the test's own."""
    users = f"{WHERE}/users"
    host.check_output(
        f"mkdir -p {users}/rescue {users}/20001 && echo {running} > {users}/20001/pids.current"
        f" && printf '%s\n' '{users} pids.max 100' '{users} memory.max 7' > {WHERE}/table"
    )
    done = host.run(f"sh -c 'echo $$ > {WHERE}/caller; PAM_USER=nina {WHERE}/admit; exit $?'")
    return done.rc, done.stdout + done.stderr


def test_a_login_puts_its_process_into_the_persons_cgroup(login: Host) -> None:
    assert limits(login, "91") == (0, "")
    read = login.check_output(f"cd {WHERE}/users/20001 && cat pids.max memory.max cgroup.procs").split()
    assert read == ["100", "7", login.check_output(f"cat {WHERE}/caller")]
    assert login.check_output(f"ls {WHERE}/users/rescue") == ""


def test_who_has_no_process_left_is_told_and_gets_in_to_end_some(login: Host) -> None:
    code, said = limits(login, "92")
    assert code == 0 and "You have 92 processes and threads here, of 100" in said and "kill -9 -1" in said
    caller = login.check_output(f"cat {WHERE}/caller")
    assert login.check_output(f"cd {WHERE}/users/rescue && ls && cat *").split() == ["cgroup.procs", caller]
    assert login.check_output(f"ls {WHERE}/users/20001") == "pids.current"


def test_root_has_no_share(login: Host) -> None:
    limits(login, "1")
    login.check_output(f'rm -r {WHERE}/users/* && PAM_USER=root {WHERE}/admit && test -z "$(ls {WHERE}/users)"')


def test_who_is_not_let_in_takes_no_share(login: Host) -> None:
    login.check_output(f"mkdir -p {WHERE}/asked && echo 1 $(cut -d' ' -f22 /proc/1/stat) > {WHERE}/asked/nina")
    assert limits(login, "1")[0] == 1
    assert login.check_output(f"ls {WHERE}/users/20001") == "pids.current"


def test_a_cgroup_that_cannot_be_written_is_told_and_keeps_nobody_out(login: Host) -> None:
    login.check_output(f"mkdir -p {WHERE}/users/20001/memory.max")
    code, said = limits(login, "1")
    assert code == 0 and f"cannot write 7 to {WHERE}/users/20001/memory.max" in said
    # The rest is done all the same.
    assert login.check_output(f"cat {WHERE}/users/20001/pids.max") == "100"
