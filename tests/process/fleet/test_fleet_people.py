"""The page for people, over a real socket and in a real browser: what it shows, and what it lets nobody do."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fleet import FleetError
from fleet.decide.decide import Decision
from fleet.policy import Machines, Policy, parse_policy
from fleet.report import web as adapter
from fleet.report.jobs import KEPT, SENT, JobTable, read_table, report_jobs
from fleet.report.status import CELLS, Jobs, detail, picture
from fleet.report.web import PageServer, PageSource
from fleet.world.slurm import SlurmView
from fleet.world.snapshot import FleetSnapshot, Unknown
from tests import browser as browsers
from tests.browser import Browser, browser
from tests.fleet_world import Worlds
from tests.support.fleet_pages import asked

HOSTILE = "<img src=x onerror='window.hurt=1'><script>window.hurt=1</script>\u202e\x1b[2J{{7*7}}"
# The first paint, and from the data's arrival to the picture of it.
TOOK = """(() => { const [drawn] = performance.getEntriesByName("drawn"),
    [data] = performance.getEntriesByType("resource").filter((one) => one.name.endsWith("fleet.json"));
    return [performance.getEntriesByName("first-paint")[0].startTime, drawn.startTime - data.responseEnd]; })()"""
# Where pictures are drawn to be looked at; the documentation's are those of docs/pictures.
PICTURES = os.environ.get("MINIVM_PICTURES", "")


@dataclass
class Seen(PageSource):
    """Worlds of a test's own, looked at as they are now."""

    worlds: Worlds
    blind: str = ""
    leads: bool = True
    known: Jobs | None = field(default_factory=dict)
    listed: list[dict[str, object]] | None = None  # None: slurmrestd does not answer
    last: SlurmView | None = None

    def __post_init__(self) -> None:
        self.policy, self.acts = (lambda: self.worlds.policy), (lambda: self.leads)

    async def now(self) -> tuple[float, FleetSnapshot, Decision]:
        world = self.worlds.world(blind=self.blind)
        if isinstance(world.slurm, SlurmView):
            self.last = world.slurm
        world = replace(world, last=self.last, last_at=time.time() - 720)
        return time.monotonic(), world, self.worlds.decide(world)

    async def jobs(self) -> Jobs | None:
        return self.known

    async def table(self) -> tuple[float, JobTable | None, str]:
        if self.listed is None:
            return time.monotonic(), None, "no answer"
        return time.monotonic(), read_table(self.listed, NOW, names=self.worlds.policy.job_names), ""


@dataclass
class Served:
    watch: Seen
    port: int = 0

    def ask(self, path: str, *heads: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
        lines = [f"{method} {path} HTTP/1.1", *(heads or (f"Host: localhost:{self.port}",)), "", ""]
        found = asyncio.run(asked(self.port, "\r\n".join(lines).encode()))
        head, _, body = found.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        return int(first.split()[1]), dict(line.split(": ", 1) for line in rest), body

    def data(self, path: str = "/fleet.json") -> dict[str, Any]:
        status, _, body = self.ask(path)
        assert status == 200, (status, body)
        found: dict[str, Any] = json.loads(body)
        return found

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}/"


@pytest.fixture
def served() -> Iterator[Callable[[Worlds], Served]]:
    ends: list[Callable[[], object]] = []

    def serve(worlds: Worlds) -> Served:
        made, ready, loop = Served(Seen(worlds)), threading.Event(), asyncio.new_event_loop()

        async def whole() -> None:
            async with await PageServer(made.watch, "127.0.0.1").serve("127.0.0.1", 0) as server:
                made.port = server.sockets[0].getsockname()[1]
                over = asyncio.Event()
                ends.append(lambda: loop.call_soon_threadsafe(over.set))
                ready.set()
                await over.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(whole()))
        thread.start()
        assert ready.wait(30)
        ends.append(thread.join)
        return made

    yield serve
    for end in ends:
        end()


def fleet(size: int = 12, policy: Policy | None = None) -> Worlds:
    worlds = Worlds(size, policy)
    worlds.machines = {}
    worlds.settle_in(200)
    return worlds


Serve = Callable[[Worlds], Served]


def test_it_is_read_by_get_alone_and_asks_a_browser_to_trust_nobody_else(served: Serve) -> None:
    page = served(fleet())
    for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css"),
                       ("/fleet.json", "application/json"), ("/nothing", "text/plain")):  # fmt: skip
        status, heads, body = page.ask(path)
        assert (status, heads["Content-Type"]) == (404 if path == "/nothing" else 200, f"{kind}; charset=utf-8")
        policy = heads["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert heads["X-Content-Type-Options"] == "nosniff"
        assert heads["Cross-Origin-Resource-Policy"] == "same-origin"
        assert not {"Set-Cookie", "Access-Control-Allow-Origin"} & heads.keys()
        assert b"style=" not in body and b"http://" not in body.replace(b"http://www.w3.org", b"")
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert page.ask("/fleet.json", method=method)[0] in (403, 405)
    assert page.ask("/../policy.json")[0] == 404
    assert page.ask("/page.js/..%2f..%2fpolicy.py")[0] == 404
    assert page.ask("/fleet.json?about=../../etc")[0] == 404
    for nonsense in ("//[", "/fleet.json?" + "a=1&" * 99, "http://[::1/fleet.json"):
        assert page.ask(nonsense)[0] == 404, nonsense


def test_another_page_in_the_same_browser_does_not_see_it_by_a_name_of_its_own(served: Serve) -> None:
    page = served(fleet())
    for host in ("evil.example", "evil.example:8651", "localhost.evil.example", "", "127.0.0.1.evil.example"):
        assert page.ask("/fleet.json", f"Host: {host}")[0] == 403, host
    for host in ("localhost:1", "127.0.0.1", "[::1]:8651", "LOCALHOST"):
        assert page.ask("/fleet.json", f"Host: {host}")[0] == 200, host


def test_what_has_not_changed_is_not_sent_again_and_what_is_sent_is_packed(served: Serve) -> None:
    worlds = fleet()
    page = served(worlds)
    here = f"Host: localhost:{page.port}"
    _, heads, plain = page.ask("/fleet.json", here)
    assert page.ask("/fleet.json", here, f"If-None-Match: {heads['ETag']}")[0] == 304
    worlds.person_drains("w3")
    status, after, packed = page.ask("/fleet.json", here, f"If-None-Match: {heads['ETag']}", "Accept-Encoding: gzip")
    assert (status, after["Content-Encoding"]) == (200, "gzip")
    assert len(packed) < len(plain)
    cells = json.loads(gzip.decompress(packed))["cells"]
    assert [one["name"] for one in cells if one["state"] == "Drained"] == ["w3"]


def test_of_one_machine_all_is_told_and_of_its_jobs_the_numbers_alone(served: Serve) -> None:
    worlds = fleet()
    worlds.wants("n3", "drain", "fan 3")
    worlds.verdict("w4", "gpu_lost[reboot]@9f2c001 7 of 8 GPUs")
    worlds.slurm["w5"].jobs.add(77)
    worlds.settle_in(200)
    page = served(worlds)
    page.watch.known = {"w5": ("77",)}
    one = page.data("/fleet.json?about=w3")
    assert (one["state"], one["reason"], one["machine"]["goal"]) == (
        "Drained",
        "minivm: fleet: goal: drain fan 3",
        "drain",
    )
    assert [event["what"] for event in one["machine"]["history"]] == ["node"]
    ill = page.data("/fleet.json?about=w4")
    assert ill["machine"]["verdict"].startswith("gpu_lost[reboot]@9f2c001")
    assert [event["what"] for event in ill["machine"]["history"]] == ["node", "verdict"]
    assert any("would be reboot" in stand["text"] for stand in ill["stands"])
    busy = page.data("/fleet.json?about=w5")
    assert (busy["state"], busy["jobs"]) == ("Busy", ["77"])
    page.watch.known = None
    assert page.data("/fleet.json?about=w5")["jobs"] is None, "not known is not none"
    cells = {one["name"]: one for one in page.data()["cells"]}
    assert cells["w4"]["told"] == "proposal" and cells["w3"]["goal"] == "drain"


def test_what_others_write_is_short_and_there_is_only_so_much_of_it() -> None:
    worlds = Worlds(300)
    for name, node in worlds.nodes.items():
        node.annotations["minivm.io/cordon-reason"] = HOSTILE * 200
        node.cordoned = True
        node.labels["topology.kubernetes.io/rack"] = HOSTILE * 200
        worlds.person_drains(f"w{name[1:]}")
        worlds.slurm[f"w{name[1:]}"].reason = HOSTILE * 200
    world = worlds.world()
    decision = worlds.decide(world)
    said = picture(world, decision, worlds.policy, worlds.now)
    assert said["all"]["holds"] >= 300 > len(said["holds"])
    assert said["holds"][0]["about"] == "fleet", "what is told of the whole is not left out"
    assert len(json.dumps(said)) < 1_000_000
    one = detail("w7", world, decision, {"w7": tuple(map(str, range(10_000)))})
    assert one is not None and one["jobsInAll"] == 10_000
    assert len(json.dumps(one)) < 20_000
    assert all(text.isprintable() for text in (said["cells"][0]["rack"], said["cells"][0]["reason"], one["reason"]))
    assert CELLS >= 5000


def test_who_does_not_act_looks_for_himself_now_and_then_and_asks_for_jobs_no_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worlds = fleet()
    asked_for: list[str] = []

    class Rest:
        def look(self, *, jobs: bool) -> SlurmView:
            asked_for.append("nodes")
            if len(asked_for) > 1:
                raise FleetError("ask slurmrestd", "no answer")
            found = worlds.world().slurm
            assert isinstance(found, SlurmView)
            return found

        def holding(self) -> Jobs:
            asked_for.append("jobs")
            return {"w1": ("7",)}

    class Cache:
        def world(self) -> object:
            return worlds.world().kubernetes

    acts = False
    watch = PageSource(Cache(), Rest(), lambda: worlds.policy, lambda: acts)  # type: ignore[arg-type]  # all that it asks

    async def whole() -> None:
        nonlocal acts
        for _ in range(5):
            assert len(list((await watch.now())[1].workers())) == 12
            assert await watch.jobs() == {"w1": ("7",)}
        assert asked_for == ["nodes", "jobs"]
        monkeypatch.setattr(adapter, "SLURM_S", -1.0)
        assert isinstance((await watch.now())[1].slurm, Unknown)
        acts = True
        world = worlds.world()
        watch.update(world, worlds.decide(world))
        assert (await watch.now())[1] is world, "what it has decided by"

    asyncio.run(whole())


# Jobs, as slurmrestd lists them.
NOW = 1_790_000_000
SET = {"set": True, "infinite": False}


def listed_job(number: int, state: str = "RUNNING", **more: object) -> dict[str, object]:
    """Return a job with the fields that slurmrestd gives each."""
    times = {"submit_time": NOW - 600, "eligible_time": NOW - 600, "start_time": NOW - 300, "end_time": NOW + 3600}
    return {
        "job_id": number, "job_state": [state], "state_reason": "None", "name": f"train-{number}", "user_name": "alice",
        "partition": "all", "nodes": "w1", "node_count": {**SET, "number": 1}, "time_limit": {**SET, "number": 60},
        **{key: {**SET, "number": value} for key, value in times.items()}, **more,
    }  # fmt: skip


ENDED = {"end_time": {**SET, "number": NOW - 10}}
JOBS_OF_ALL_KINDS = [
    listed_job(1),
    listed_job(2, "PENDING", state_reason="Resources", nodes="", start_time={**SET, "number": NOW + 60}),
    listed_job(3, "FAILED", state_reason="NonZeroExitCode", exit_code={"return_code": {**SET, "number": 3}}, **ENDED),
    listed_job(4, "NODE_FAIL", admin_comment="minivm: machine n7: GPU 3 lost; alice's job is requeued", **ENDED),
    listed_job(5, "FAILED", exit_code={"signal": {"id": {**SET, "number": 11}, "name": "SEGV"}}, **ENDED),
    listed_job(12, "CANCELLED", state_reason="Priority", restart_cnt=2, **ENDED),
    listed_job(7, "PENDING", array_job_id={**SET, "number": 6}, array_task_string="3-9%2", state_reason="Priority"),
    listed_job(8, array_job_id={**SET, "number": 6}, array_task_id={**SET, "number": 2}),
    listed_job(10, het_job_id={**SET, "number": 9}, het_job_offset={**SET, "number": 1}),
    listed_job(11, state_reason=7),
]


def test_each_job_has_a_row_that_says_why_it_waits_or_ended() -> None:
    said = report_jobs(read_table(JOBS_OF_ALL_KINDS, NOW, names=True), "", "")
    rows = {row["job"]: row for row in said["rows"]}
    assert list(rows) == ["3", "4", "5", "12", "1", "6_2", "9+1", "2", "6_[3-9%2]"], "the latest change first"
    assert {key: row.get("why", "") for key, row in rows.items()} == {
        "1": "", "6_2": "", "9+1": "", "2": "Resources", "6_[3-9%2]": "Priority", "3": "exit code 3",
        "5": "signal SEGV", "12": "requeued 2 times",
        "4": "machine n7: GPU 3 lost; alice's job is requeued",
    }  # fmt: skip
    assert (rows["1"]["user"], rows["1"]["name"], rows["1"]["limit"]) == ("alice", "train-1", 60)
    assert (rows["3"]["started"], rows["3"]["ended"]) == (NOW - 300, NOW - 10)
    assert "started" not in rows["2"], "slurmctld's guess is no start"
    assert "ended" not in rows["1"], "and no end"
    assert said["states"] == {"cancelled": 1, "failed": 2, "node fail": 1, "pending": 2, "running": 3}
    assert said["unread"] == 1
    found = report_jobs(read_table(JOBS_OF_ALL_KINDS, NOW, names=True), "", "Alice seg")
    assert [row["job"] for row in found["rows"]] == ["5"]


def test_names_owners_and_comments_of_jobs_are_shown_only_where_the_policy_says_so() -> None:
    said = json.dumps(report_jobs(read_table(JOBS_OF_ALL_KINDS, NOW, names=False), "", ""))
    assert "alice" not in said and "train" not in said and "n7" not in said
    assert "Resources" in said and "node fail" in said
    assert report_jobs(read_table(JOBS_OF_ALL_KINDS, NOW, names=False), "", "alice")["found"] == 0
    assert not Policy().job_names
    assert parse_policy({"jobNames": True}).job_names


def test_a_table_of_hostile_or_many_jobs_stays_small() -> None:
    words = dict.fromkeys(("name", "user_name", "partition", "nodes", "state_reason"), HOSTILE * 200)
    hostile = [listed_job(number, HOSTILE * 200, **words) for number in range(1000)]
    said = report_jobs(read_table(hostile, NOW, names=True), "", "")
    assert (len(said["rows"]), said["found"]) == (SENT, 1000)
    assert len(json.dumps(said)) < 1_000_000
    assert all(str(value).isprintable() for row in said["rows"] for value in row.values())
    assert report_jobs(read_table(hostile, NOW, names=True), "", "img " * 20 + "cut off")["found"] == 1000
    many = read_table((listed_job(number) for number in range(KEPT + 5)), NOW, names=True)
    assert len(many.rows) == KEPT
    assert many.states == {"running": KEPT + 5}
    broken: list[dict[str, object]] = [
        {"job_state": 7}, {"job_id": 1 << 70}, {"exit_code": "3"}, {"submit_time": "x"}, {"array_task_id": []},
    ]  # fmt: skip
    assert read_table([7, [], *broken], NOW, names=True).unread == 7


def test_slurm_is_asked_for_its_jobs_now_and_then_and_no_old_ones_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds, asked_for = fleet(), 0

    class Rest:
        def jobs(self) -> Iterator[object]:
            nonlocal asked_for
            asked_for += 1
            yield from JOBS_OF_ALL_KINDS
            if asked_for > 1:
                raise FleetError("ask slurmrestd", "the answer breaks off")

    watch = PageSource(None, Rest(), lambda: worlds.policy, lambda: True)  # type: ignore[arg-type]  # all that it asks

    async def whole() -> None:
        for _ in range(3):
            assert len((await watch.table())[1].rows) == 9  # type: ignore[union-attr]
        assert asked_for == 1
        monkeypatch.setattr(adapter, "JOBS_S", -1.0)
        _, table, why = await watch.table()
        assert (table, "breaks off" in why) == (None, True)
        assert report_jobs(table, why, "") == {
            "known": False, "why": why, "rows": [], "found": 0, "states": {}, "unread": 0,
        }  # fmt: skip

    asyncio.run(whole())


# In a browser.


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not browsers.program():
        pytest.skip(
            "no chromium here: `make .venv/ready; python3 images/host.py test-tools` installs it where there is one"
        )
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(shared_browser: Browser) -> Browser:
    shared_browser.clear()
    return shared_browser


def site(size: int = 360) -> Worlds:
    """Racks of 24, two thirds of them at work."""
    worlds = fleet(size, Policy(machines=Machines(mode="propose")))
    for number, (name, node) in enumerate(worlds.nodes.items()):
        node.labels["topology.kubernetes.io/rack"] = f"rack {int(name[1:]) // 24 + 1}"
        if number % 3:
            worlds.slurm[f"w{number}"].jobs.add(number)
    return worlds


def healthy() -> Worlds:
    return site()


def rolling() -> Worlds:
    worlds = site()
    for number in range(120):
        worlds.annotate(f"w{number}", "minivm.io/leave", "new template 7c6cc41e")
    worlds.settle_in(200)
    return worlds


def incident() -> Worlds:
    worlds = site()
    worlds.verdict("w37", "gpu_lost[reboot]@9f2c001 GPU 3b:00 has fallen off the bus")
    worlds.person_drains("w200")
    worlds.cordon("n210", "n211")
    for number in range(240, 348):
        worlds.ready(f"n{number}", False)
        if number % 2:
            worlds.slurm[f"w{number}"].responds = False
    worlds.now += 70
    worlds.settle_in(200)
    return worlds


def shown(page: Browser, served: Served, many: int) -> None:
    page.open(served.url)
    page.until(f"document.querySelectorAll('button.cell').length === {many}", "every machine is a cell")


def counts(page: Browser, kind: str) -> int:
    found = page.value(f"document.querySelectorAll('button.cell.{kind}').length")
    assert isinstance(found, int)
    return found


def drawn(page: Browser, directory: Path, scene: str) -> None:
    """Draw the page light and dark."""
    for dark in (False, True):
        page.scheme(dark=dark)
        page.picture((Path(PICTURES) if PICTURES else directory) / f"fleet-{scene}{'-dark' if dark else ''}.png")


@pytest.mark.parametrize(
    ("scene", "wanted"),
    [
        (healthy, {"Busy": 240, "TakesJobs": 120}),
        (rolling, {"Draining": 80}),
        (incident, {"proposal": 1, "cordoned": 2}),
    ],
)
def test_a_fleet_is_seen_as_it_is(
    page: Browser, served: Serve, tmp_path: Path, scene: Callable[[], Worlds], wanted: dict[str, int]
) -> None:
    worlds = scene()
    shown(page, served(worlds), 360)
    assert {kind: counts(page, kind) for kind in wanted} == wanted
    said = page.value("document.body.innerText")
    assert "360 workers, this fleet acts" in said
    alarm = page.value("document.getElementById('alarm').innerText")
    assert ("more than 72 of" in alarm) == (scene is incident)
    if scene is incident:
        page.value("document.querySelector('[data-name=w37]').click()")
        page.until("document.getElementById('one').innerText.includes('gpu_lost')", "the evidence is there")
    drawn(page, tmp_path, scene.__name__)
    assert page.said == []


def small() -> Worlds:
    worlds = fleet(6)
    worlds.controller.node = "n0"
    worlds.slurm["w0"].jobs.add(7)
    worlds.person_drains("w2")
    worlds.slurm["w2"].reason = "fan 3 is loud, see ticket 4711"
    worlds.cordon("n4")
    worlds.settle_in(200)
    worlds.dies("n5")
    del worlds.pods["w5"]
    return worlds


@pytest.mark.parametrize("away", [False, True], ids=["small", "outage"])
def test_a_small_fleet_has_names_and_reasons_in_its_cells(
    page: Browser, served: Serve, tmp_path: Path, away: bool
) -> None:
    here = served(small())
    shown(page, here, 6)
    page.until("document.getElementById('pools').innerText.includes('see ticket 4711')", "the reason is in the cell")
    texts = page.value("[...document.querySelectorAll('button.cell')].map((one) => one.innerText)")
    assert [name for name in ("w0", "w1", "w2", "w3", "w4") if not any(name in text for text in texts)] == []
    assert "5 workers, 1 machine without one" in page.value("document.body.innerText")
    if away:
        here.watch.blind = "slurm"
        page.until("document.body.className === 'stale'", "slurmctld is away")
        assert counts(page, "Drained") == 2
    page.value("[...document.querySelectorAll('button.cell')].at(-1).querySelector('.name').click()")
    page.until("!document.getElementById('one').hidden", "a click on the text opens the details")
    assert "undefined" not in page.value("document.body.innerText")
    drawn(page, tmp_path, "outage" if away else "small")


def test_a_hundred_and_fifty_cells_have_their_names(page: Browser, served: Serve, tmp_path: Path) -> None:
    worlds = site(150)
    worlds.person_drains("w3")
    worlds.cordon("n7")
    worlds.settle_in(200)
    shown(page, served(worlds), 150)
    texts = "[...document.querySelectorAll('button.cell')].slice(0, 6).map((one) => one.innerText).join('|')"
    page.until(f"{texts} === 'w0|w1|w2|D w3|w4|w5'", "the names are in the cells")
    cut = "[...document.querySelectorAll('button.cell')].filter((one) => one.scrollWidth > one.clientWidth).length"
    assert page.value(cut) == 0, "a name fits into its cell"
    drawn(page, tmp_path, "medium")


def test_three_machines_have_cards(page: Browser, served: Serve, tmp_path: Path) -> None:
    worlds = fleet(3)
    worlds.person_drains("w1")
    worlds.slurm["w1"].reason = "fan 3 is loud, see ticket 4711"
    shown(page, served(worlds), 3)
    page.until("document.getElementById('pools').innerText.includes('see ticket 4711')", "the reason is in the cell")
    assert page.value("document.querySelectorAll('button.cell')[0].getBoundingClientRect().width") > 150
    drawn(page, tmp_path, "three")


def test_on_a_narrow_screen_nothing_is_squeezed(page: Browser, served: Serve, tmp_path: Path) -> None:
    page.size(420, 900)
    shown(page, served(site()), 360)
    page.until("document.getElementById('stand').innerText.includes('this fleet acts')", "how it stands is told")
    wide, high = page.value(
        "(({width, height}) => [width, height])(document.getElementById('stand').getBoundingClientRect())"
    )
    assert wide > 350, "it has a line of its own"
    assert high < 50, "which is one, or two"
    assert page.value("document.documentElement.scrollWidth") <= 420, "nothing is beside the screen"
    drawn(page, tmp_path, "narrow")


def test_it_is_used_by_keys_alone(page: Browser, served: Serve) -> None:
    worlds = site()
    worlds.slurm["w2"].drained_by, worlds.slurm["w2"].reason = "person", "look at fan 3"
    shown(page, served(worlds), 360)
    at = "document.activeElement.dataset.name || document.activeElement.id"
    for where in ("to-machines", "to-jobs", "find", "w0"):
        page.key("Tab")
        assert page.value(at) == where, "one stop for all cells"
    for key, where in (("ArrowRight", "w1"), ("ArrowRight", "w2")):
        page.key(key)
        assert page.value(at) == where
    assert "look at fan 3" in page.value("document.activeElement.getAttribute('aria-label')")
    page.key("Enter")
    page.until("document.getElementById('one').innerText.includes('look at fan 3')", "what holds it is told")
    page.key("Escape")
    page.until("document.getElementById('one').hidden", "and gone")
    assert page.value(at) == "w2"
    page.key("ArrowDown")
    assert page.value(at) not in ("w2", "find")
    page.key("End")
    assert page.value(at) == "w359"


def test_no_word_of_others_is_markup(page: Browser, served: Serve) -> None:
    worlds = fleet()
    for name, node in worlds.nodes.items():
        node.labels["topology.kubernetes.io/rack"] = HOSTILE
        worlds.person_drains(f"w{name[1:]}")
        worlds.slurm[f"w{name[1:]}"].reason = HOSTILE
    worlds.cordon("n1")
    shown(page, served(worlds), 12)
    page.value("document.querySelector('[data-name=w1]').click()")
    page.until("document.getElementById('one').innerText.includes('<img')", "it is text")
    assert page.value("document.querySelectorAll('img, main script').length") == 0
    assert page.value("window.hurt === undefined")
    assert page.said == []


def test_what_changes_is_seen_without_a_reload_and_what_is_not_known_is_said(page: Browser, served: Serve) -> None:
    worlds = fleet()
    here = served(worlds)
    shown(page, here, 12)
    page.value("void (window.mine = 1)")
    worlds.person_drains("w3")
    page.until("document.querySelectorAll('button.cell.Drained').length === 1", "a drain is seen")
    here.watch.blind = "slurm"
    page.until("document.getElementById('stand').innerText.includes('those of 12 min ago')", "the age of the states")
    assert "Slurm does not answer: no answer" in page.value("document.getElementById('stand').innerText")
    assert counts(page, "Drained") == 1, "what was seen last stays"
    worlds.cordon("n5")
    page.until("document.querySelectorAll('button.cell.cordoned').length === 1", "Kubernetes' side goes on")
    assert page.value("document.body.className") == "stale"
    here.watch.blind = ""
    page.until("document.body.className === ''", "and is over")
    assert page.value("window.mine") == 1


def test_five_thousand_cells_are_drawn_found_and_walked(page: Browser, served: Serve, tmp_path: Path) -> None:
    worlds = Worlds(5000)
    worlds.person_drains("w4711")
    shown(page, served(worlds), 5000)
    drawn(page, tmp_path, "five-thousand")
    page.value("(() => { const find = document.getElementById('find'); find.value = 'fan 3';"
               " find.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert page.value("document.querySelectorAll('button.cell:not(.not)').length") == 1
    took = page.value(TOOK)
    print(f"5,000 cells: first paint after {took[0]:.0f} ms, drawn {took[1]:.0f} ms after they were there")
    assert page.said == []


def test_jobs_are_seen_found_and_are_no_markup(page: Browser, served: Serve, tmp_path: Path) -> None:
    here = served(fleet(policy=Policy(job_names=True)))
    hostile = listed_job(99, "FAILED", name=HOSTILE, user_name=HOSTILE, nodes=HOSTILE, **ENDED)
    here.watch.listed = [*JOBS_OF_ALL_KINDS, hostile]
    shown(page, here, 12)
    page.value("document.getElementById('to-jobs').click()")
    rows = "[...document.querySelectorAll('#job-table tr')].map((row) => row.innerText)"
    page.until(f"{rows}.length === 11", "a row for each job that can be read, and the heads")
    texts = page.value(rows)
    assert any("Resources" in text and "pending" in text and "waited" in text for text in texts)
    assert any("GPU 3 lost" in text and "ended" in text for text in texts)
    assert page.value("document.querySelectorAll('img, main script').length") == 0
    assert page.value("window.hurt === undefined")
    assert page.value("document.getElementById('machines').hidden")
    drawn(page, tmp_path, "jobs")
    assert "1 jobs could not be read" in page.value("document.getElementById('job-more').innerText")
    page.value("void (document.getElementById('find').value = 'pending 6_')")
    page.value("document.getElementById('find').dispatchEvent(new Event('input'))")
    page.until(f"{rows}.length === 2", "what is searched for")
    here.watch.listed = None
    page.until("document.getElementById('job-states').innerText.includes('not known: no answer')", "an outage is told")
    assert page.value(f"{rows}.length") == 0, "old jobs are not shown as those of now"
    page.value("document.getElementById('to-machines').click()")
    page.until("!document.getElementById('machines').hidden", "the machines are back")
    assert page.said == []
