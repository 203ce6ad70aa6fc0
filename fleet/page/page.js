"use strict";
// Every word that comes from Slurm or Kubernetes is set as text, never as markup.

const EVERY_MS = 5000, SILENT_MS = 20000;
// A letter beside the colour, for readers who do not tell these colours apart.
const STATES = {
  TakesJobs: ["", "takes jobs"], Busy: ["", "has jobs"], Draining: ["g", "draining"], Drained: ["D", "drained"],
  Down: ["X", "down"], NotResponding: ["?", "does not respond"], Unregistered: ["u", "not in Slurm"],
  NoWorker: ["-", "no worker"], GivenUp: ["G", "given up"], Absent: ["a", "absent"],
  SlurmUnknown: ["?", "not known"],
};
// Up to so many cells each one is a card with its name and reason; up to the next number it has its name.
const CARDS = 60, NAMED = 200;
const at = (id) => document.getElementById(id);
const cells = new Map(); // name -> {button, key, words}
const byName = new Intl.Collator("en", {numeric: true}).compare; // w-2 before w-10
let order = [], racks = "", tag = "", heard = 0, chosen = "", said = null, focused = "";

function make(kind, text, name) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function words(cell) {
  const state = STATES[cell.state] || ["", cell.state];
  return [cell.name, cell.node && cell.node !== cell.name ? `on ${cell.node}` : "", state[1], cell.cordoned ? "cordoned" : "",
    cell.goal ? `goal ${cell.goal}` : "", cell.told === "proposal" ? "something is proposed" : "", cell.reason || ""]
    .filter(Boolean).join(", ");
}

function paint(button, cell, mode) {
  const known = cell.state in STATES;
  button.className = ["cell", known ? cell.state : "", cell.cordoned ? "cordoned" : "",
    cell.told === "proposal" ? "proposal" : "", cell.name === chosen ? "chosen" : ""].filter(Boolean).join(" ");
  const letter = known ? STATES[cell.state][0] : "?";
  if (mode !== "cards") {
    button.textContent = mode === "named" ? `${letter} ${cell.name}`.trim() : letter;
    return label(button, cell);
  }
  const state = [known ? STATES[cell.state][1] : cell.state, cell.cordoned ? "cordoned" : "", cell.goal ? `goal ${cell.goal}` : ""];
  button.replaceChildren(make("span", cell.name, "name"), make("span", letter, "letter"),
    make("span", state.filter(Boolean).join(", "), "state"), make("span", cell.reason || "", "reason"));
  label(button, cell);
}

function label(button, cell) {
  button.title = words(cell);
  button.setAttribute("aria-label", words(cell));
}

function drawCells(found) {
  const mode = found.length <= CARDS ? "cards" : found.length <= NAMED ? "named" : "";
  at("pools").className = mode;
  const places = new Map(); // pool -> rack -> cells
  for (const cell of found) {
    const pool = cell.pool || "no worker", rack = cell.rack || "";
    if (!places.has(pool)) places.set(pool, new Map());
    if (!places.get(pool).has(rack)) places.get(pool).set(rack, []);
    places.get(pool).get(rack).push(cell);
  }
  const shape = JSON.stringify([...places].map(([pool, in_]) => [pool, [...in_].map(([rack, on]) => [rack, on.map((one) => one.name)])]));
  if (shape !== racks) {
    racks = shape;
    order = [];
    const kept = new Map(cells);
    cells.clear();
    const drawn = document.createDocumentFragment();
    for (const [pool, in_] of [...places].sort(([one], [other]) => byName(one, other))) {
      const section = make("section");
      section.append(make("h2", pool));
      const racksOf = make("div", undefined, "racks");
      for (const [rack, on] of [...in_].sort(([one], [other]) => byName(one, other))) {
        const box = make("div", undefined, "rack"), list = make("div", undefined, "cells");
        if (rack) box.append(make("h3", rack));
        for (const cell of on.sort((one, other) => byName(one.name, other.name))) {
          const button = kept.has(cell.name) ? kept.get(cell.name).button : make("button");
          button.type = "button";
          button.dataset.name = cell.name;
          button.tabIndex = -1;
          cells.set(cell.name, {button, key: "", words: ""});
          order.push(cell.name);
          list.append(button);
        }
        box.append(list);
        racksOf.append(box);
      }
      section.append(racksOf);
      drawn.append(section);
    }
    at("pools").replaceChildren(drawn);
    if (!cells.has(focused)) focused = order[0] || "";
    if (cells.has(focused)) cells.get(focused).button.tabIndex = 0;
  }
  for (const cell of found) {
    const one = cells.get(cell.name), key = JSON.stringify(cell) + (cell.name === chosen) + mode;
    if (one.key === key) continue;
    one.key = key;
    one.words = `${words(cell)} ${cell.rack || ""} ${cell.pool || ""} ${cell.state}`.toLowerCase();
    paint(one.button, cell, mode);
  }
  filter();
}

function filter() {
  const wanted = at("find").value.trim().toLowerCase();
  for (const one of cells.values()) one.button.classList.toggle("not", wanted !== "" && !one.words.includes(wanted));
}

function drawLegend(found) {
  const counted = {};
  for (const cell of found) counted[cell.state] = (counted[cell.state] || 0) + 1;
  const drawn = Object.entries(STATES).filter(([state]) => counted[state]).map(([state, [letter, text]]) => {
    const item = make("li"), sample = make("span", letter, `sample ${state}`);
    sample.ariaHidden = "true";
    item.append(sample, make("span", `${counted[state]} ${text}`));
    return item;
  });
  const cordoned = found.filter((cell) => cell.cordoned).length, proposed = found.filter((cell) => cell.told === "proposal").length;
  for (const [many, name, text] of [[cordoned, "cordoned", "cordoned"], [proposed, "proposal", "something is proposed"]]) {
    if (!many) continue;
    const item = make("li");
    item.append(make("span", "", `sample ${name}`), make("span", `${many} ${text}`));
    drawn.push(item);
  }
  at("legend").replaceChildren(...drawn);
}

function drawSums(now) {
  const table = make("table"), head = make("tr");
  for (const text of ["pool", "workers", "away"]) head.append(make("th", text));
  table.append(head);
  for (const [pool, one] of Object.entries(now.pools)) {
    const row = make("tr");
    const workers = one.max === undefined ? one.workers : `${one.workers} of ${one.min} to ${one.max}`;
    for (const text of [pool, workers, `${one.away} of ${one.mayBeAway}`]) row.append(make("td", text));
    table.append(row);
  }
  const list = make("dl"), budgets = now.budgets;
  for (const one of now.controllers.length > 1 ? now.controllers : []) {
    entry(list, one.name, `${one.ready ? "" : "not ready; "}${one.text || "whether it acts is not known"}`);
  }
  entry(list, "drained for signs of unwell machines", `${budgets.unwell.now} of at most ${budgets.unwell.most}`);
  entry(list, "machines in treatment", `${budgets.remedies.now} of at most ${budgets.remedies.most} (${budgets.remedies.mode})`);
  entry(list, "dead machines", budgets.fencing.mode);
  at("sums").replaceChildren(make("h2", "Pools and budgets"), table, list);
}

function entry(list, name, text) {
  if (text === "" || text === undefined || text === null) return;
  list.append(make("dt", name), make("dd", text));
}

function listed(title, texts, all) {
  const part = make("div");
  if (!texts.length) return part;
  part.append(make("h2", `${title} (${all})`));
  const list = make("ul");
  for (const text of texts) list.append(make("li", text));
  if (all > texts.length) list.append(make("li", `… and ${all - texts.length} more`));
  part.append(list);
  return part;
}

// What holds the fleet as a whole, such as a pause. The headline says already which side does not answer.
const WHOLE = ["fleet", "Slurm", "Kubernetes"];

function drawLists(now) {
  const alarms = now.holds.filter((one) => WHOLE.includes(one.about) && one.kind !== "unknown").map((one) => make("p", one.text));
  if (at("alarm").textContent !== alarms.map((one) => one.textContent).join("")) at("alarm").replaceChildren(...alarms);
  const told = (one) => `${one.about}: ${one.text}`;
  at("lists").replaceChildren(
    listed(now.acts ? "Under way" : "Would be done", now.due, now.all.due),
    listed("Proposed", now.proposals.map(told), now.all.proposals),
    listed("Held, and why", now.holds.map(told), now.all.holds));
}

function drawOne(one) {
  const head = make("header"), close = make("button", "close", "close"), list = make("dl"), machine = one.machine || {};
  close.type = "button";
  close.addEventListener("click", () => choose(""));
  head.append(make("h2", one.name), close);
  entry(list, "state", (STATES[one.state] || ["", one.state])[1] + (one.cordoned ? ", cordoned" : ""));
  entry(list, "in Slurm", one.slurm);
  entry(list, "reason", one.reason);
  entry(list, "pool", one.pool);
  entry(list, "rack", one.rack);
  entry(list, "Node", one.node || machine.node);
  if ("ready" in one) entry(list, "pod", one.leaves ? "going" : one.ready ? "ready" : "not ready");
  if (one.jobs) entry(list, "jobs", one.jobs.length ? `${one.jobs.join(" ")}${one.jobsInAll > one.jobs.length ? " …" : ""}` : "none");
  if (one.jobs === null) entry(list, "jobs", "not known");
  entry(list, "machine", machine.name);
  entry(list, "goal", machine.goal && `${machine.goal} ${machine.why || ""}`);
  entry(list, "evidence", machine.verdict);
  entry(list, "verdicts", machine.repeats || "");
  entry(list, "in treatment", machine.remedy && `${machine.remedy.goal}, since ${machine.remedy.at}`);
  for (const check of machine.activeChecks || []) {
    const passed = check.passedAt ? `passed ${check.passedAt}` : "never passed";
    entry(list, `active check ${check.check}`, `${passed}; last results ${check.results}`);
  }
  entry(list, "GPUs", (machine.gpus || []).join(" "));
  const signs = (one.signs || []).map((sign) => `${sign.type} ${sign.status} ${sign.text}`.trim());
  const past = (machine.history || []).map((event) => `${event.at} ${event.what} ${event.text || ""}`.trim()).reverse();
  at("one").replaceChildren(head, list, listed("What holds it", one.stands.map((stand) => stand.text), one.stands.length),
    listed("What is done", one.due, one.due.length), listed("History", past, past.length),
    listed("Conditions of its Node", signs, signs.length));
  at("one").hidden = false;
}

async function look() {
  let bad = "";
  try {
    const reply = await fetch("fleet.json", {cache: "no-cache"});
    if (!reply.ok) throw new Error(`${reply.status}`);
    const age = Number(reply.headers.get("X-Fleet-Age")) || 0;
    heard = Date.now() - age * 1000;
    const now = reply.headers.get("ETag");
    if (now !== tag || !said) {
      said = await reply.json();
      tag = now;
      // Without Kubernetes there are no cells: those that were seen last stay, pale. Without Slurm they have the last
      // known state.
      if (said.cells.length || !said.unknown.length) {
        drawCells(said.cells);
        drawLegend(said.cells);
        at("more").hidden = said.all.cells <= said.cells.length;
        at("more").textContent = `the first ${said.cells.length} of ${said.all.cells} cells`;
      }
      drawSums(said);
      drawLists(said);
      requestAnimationFrame(() => performance.mark("drawn"));
    }
    if (said.unknown.length) bad = `${said.unknown.join("; ")}${lastKnown(said.slurmAt)}`;
    if (chosen) await lookAt(chosen);
    if (showsJobs()) await lookAtJobs();
  } catch (error) {
    bad = said ? "no answer" : `no answer: ${error.message}`;
  }
  const old = Date.now() - heard > SILENT_MS;
  if (!bad && old) bad = "this is old";
  document.body.classList.toggle("stale", bad !== "");
  at("stand").className = bad ? "bad" : "";
  const whole = said ? `${counted(said.cells, said.all.cells)}, ${said.acts ? "this fleet acts" : "another fleet acts, this one watches"}` : "";
  at("stand").textContent = [bad, whole, heard ? `as of ${new Date(heard).toLocaleTimeString()}` : ""].filter(Boolean).join(" · ");
}

// One cell is a worker, or a machine on which no worker runs.
function counted(found, all) {
  const bare = found.filter((cell) => !cell.pool).length, workers = all - bare;
  const named = (many, what) => `${many} ${what}${many === 1 ? "" : "s"}`;
  return bare ? `${named(workers, "worker")}, ${named(bare, "machine")} without one` : named(workers, "worker");
}

function lastKnown(at) {
  if (!at) return "";
  const seconds = Math.max(0, Math.round(Date.now() / 1000 - at));
  const age = seconds < 120 ? `${seconds} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
  return `; Slurm's states are those of ${age} ago`;
}

async function lookAt(name) {
  const reply = await fetch(`fleet.json?about=${encodeURIComponent(name)}`, {cache: "no-cache"});
  if (name !== chosen) return;
  if (reply.ok) drawOne(await reply.json());
  else choose("");
}

function choose(name) {
  const before = chosen;
  chosen = name;
  for (const one of [before, name]) if (cells.has(one)) cells.get(one).button.classList.toggle("chosen", one === name && name !== "");
  if (!name) {
    at("one").hidden = true;
    if (cells.has(before)) cells.get(before).button.focus();
    return;
  }
  lookAt(name).catch(() => {});
}

function focusOn(name) {
  if (!cells.has(name)) return;
  if (cells.has(focused)) cells.get(focused).button.tabIndex = -1;
  focused = name;
  cells.get(name).button.tabIndex = 0;
  cells.get(name).button.focus();
}

// Up and down: the nearest cell of the row above or below, by what is on the screen.
function beside(name, way) {
  const here = cells.get(name).button.getBoundingClientRect(), index = order.indexOf(name);
  let best = "", least = Infinity;
  for (const other of order.slice(Math.max(0, index - 400), index + 400)) {
    const there = cells.get(other).button.getBoundingClientRect(), down = (there.top - here.top) * way;
    if (down <= 2 || down > 200) continue;
    const far = down * 4 + Math.abs(there.left - here.left);
    if (far < least) [best, least] = [other, far];
  }
  return best;
}

// The view of jobs. Its data is asked for only while it is shown.
let jobTag = "", jobsFound = "";

function span(seconds) {
  if (seconds < 120) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

function moment(seconds) {
  const then = new Date(seconds * 1000), today = new Date().toDateString() === then.toDateString();
  return today ? then.toLocaleTimeString() : then.toLocaleString();
}

// How long the job waited and ran, as text and as a bar of two parts.
function life(job, now) {
  const until = job.ended || now;
  const waited = Math.max(0, (job.started || until) - (job.submitted || until)), ran = job.started ? Math.max(0, until - job.started) : 0;
  const told = [job.submitted ? `submitted ${moment(job.submitted)}` : "", `waited ${span(waited)}`];
  if (job.started) told.push(`ran ${span(ran)}${job.limit ? ` of ${span(job.limit * 60)}` : ""}`);
  if (job.ended) told.push(`ended ${moment(job.ended)}`);
  else if (job.eligible > now) told.push(`may start ${moment(job.eligible)}`);
  const cell = make("td"), bar = make("div", undefined, "life"), parts = [make("span", undefined, "waited"), make("span", undefined, "ran")];
  bar.ariaHidden = "true";
  parts[0].style.flexGrow = waited;
  parts[1].style.flexGrow = ran;
  bar.append(...parts);
  cell.append(bar, make("span", told.filter(Boolean).join(", ")));
  return cell;
}

function drawJobs(said) {
  const columns = ["job", "state", "why", ...(said.names ? ["user", "name"] : []), "partition", "nodes"];
  const head = make("tr"), now = Date.now() / 1000;
  for (const text of [...columns, "life"]) head.append(make("th", text));
  const rows = said.rows.map((job) => {
    const row = make("tr");
    for (const key of columns) row.append(make("td", key === "nodes" && !job.nodes && job.count ? `${job.count} wanted` : job[key] || ""));
    row.append(life(job, now));
    return row;
  });
  at("job-table").replaceChildren(...(rows.length ? [head, ...rows] : []));
  const states = Object.entries(said.states).map(([state, many]) => `${many} ${state}`);
  at("job-states").textContent = said.known ? states.join(", ") || "no jobs" : `the jobs are not known: ${said.why}`;
  const more = [said.found > said.rows.length ? `the latest ${said.rows.length} of ${said.found} jobs` : "",
    said.unread ? `${said.unread} jobs could not be read` : "",
    said.known && !said.names ? "names and owners are shown with fleet.policy.jobNames: true" : ""];
  at("job-more").textContent = more.filter(Boolean).join("; ");
}

async function lookAtJobs() {
  const find = at("find").value.trim();
  const reply = await fetch(`jobs.json?find=${encodeURIComponent(find)}`, {cache: "no-cache"});
  if (!reply.ok) throw new Error(`${reply.status}`);
  if (!showsJobs() || find !== at("find").value.trim()) return;
  if (reply.headers.get("ETag") === jobTag && find === jobsFound) return;
  [jobTag, jobsFound] = [reply.headers.get("ETag"), find];
  drawJobs(await reply.json());
}

function showsJobs() {
  return location.hash === "#jobs";
}

function changeView() {
  const jobs = showsJobs();
  at("jobs").hidden = !jobs;
  at("machines").hidden = at("beside").hidden = jobs;
  at("to-jobs").setAttribute("aria-pressed", String(jobs));
  at("to-machines").setAttribute("aria-pressed", String(!jobs));
  jobTag = "";
  if (jobs) lookAtJobs().catch(() => {});
}

at("to-jobs").addEventListener("click", () => { location.hash = "jobs"; });
at("to-machines").addEventListener("click", () => { location.hash = ""; });
addEventListener("hashchange", changeView);
at("find").addEventListener("input", () => { if (showsJobs()) lookAtJobs().catch(() => {}); });
changeView();

at("pools").addEventListener("click", (event) => {
  const name = event.target.closest("button.cell")?.dataset.name;
  if (!name) return;
  focusOn(name);
  choose(name);
});
at("pools").addEventListener("keydown", (event) => {
  const name = event.target.dataset.name, index = order.indexOf(name);
  if (index < 0) return;
  const to = {ArrowRight: order[index + 1], ArrowLeft: order[index - 1], Home: order[0], End: order[order.length - 1]}[event.key]
    || {ArrowDown: 1, ArrowUp: -1}[event.key] && beside(name, {ArrowDown: 1, ArrowUp: -1}[event.key]);
  if (!to) return;
  event.preventDefault();
  focusOn(to);
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && chosen) choose(""); });
at("find").addEventListener("input", filter);

async function keep() {
  await look();
  setTimeout(keep, EVERY_MS);
}
keep();
