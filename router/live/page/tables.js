"use strict";
// The figures at the top, the pairs, the placements and the errors.

const FIGURES = [
  ["Requests in progress", (s) => shownNumber(s.placing + s.prefill + s.transfer + s.decode), phasesText],
  ["Tokens per second", (s) => shownNumber(s.tokens_per_s), (s) => perRequestText(s)],
  ["First token, median", (s) => shownSpan(s.ttft_p50_s), (s) => `p99 ${shownSpan(s.ttft_p99_s)}`],
  ["Per token, median", (s) => shownSpan(s.tpot_p50_s), (s) => `p99 ${shownSpan(s.tpot_p99_s)}`],
  ["KV moved", (s) => shownBytesPerS(s.kv_bytes_per_s), (s) => `${s.transfer} on the way`],
  ["Requests per second", (s) => shownNumber(s.requests_per_s), failuresText],
];
const MOST_PLACEMENTS = 256;
const SHOWN_PLACEMENTS = 32;
const MOST_ERRORS = 32;

function phasesText(sample) {
  const named = ["placing", "prefill", "transfer", "decode"];
  return named.filter((phase) => sample[phase]).map((phase) => `${sample[phase]} ${phase}`).join(", ") || "none";
}

function perRequestText(sample) {
  return sample.decode ? `${shownNumber(sample.tokens_per_s / sample.decode)} per decoding request` : "\u00a0";
}

function failuresText(sample) {
  const told = [];
  if (sample.failures_per_s) told.push(`${shownNumber(sample.failures_per_s)} failed (5xx)`);
  if (sample.refusals_per_s) told.push(`${shownNumber(sample.refusals_per_s)} refused (4xx)`);
  return told.join(", ") || "none failed";
}

function makeFigures(holder) {
  const shown = FIGURES.map(([title]) => {
    const [value, detail] = [element("dd", ""), element("dd", "quiet")];
    holder.append(element("div", "", element("dt", "", title), value, detail));
    return [value, detail];
  });
  return (sample) => FIGURES.forEach(([, show, tell], index) => {
    setText(shown[index][0], show(sample));
    setText(shown[index][1], tell(sample));
  });
}

function showPairs(pairs, nodes) {
  const alive = new Set(nodes.map((node) => node.node_id));
  const fastest = Math.max(1, ...pairs.map((pair) => pair.bytes_per_s));
  const rows = pairs.map((pair) => {
    const fill = element("i", "");
    fill.style.width = `${(100 * pair.bytes_per_s) / fastest}%`;
    const state = !alive.has(pair.decode) ? "away" : pair.is_connected ? "connected" : "idle";
    return element("tr", "",
      element("td", "", pair.prefill), element("td", "", pair.decode), element("td", "", pair.transport),
      element("td", "", state), element("td", "number", shownBytesPerS(pair.bytes_per_s)),
      element("td", "bar-cell", element("div", "meter", fill)),
      element("td", "number", shownBytes(pair.num_bytes)));
  });
  showRows("pairs", rows);
}

class PlacementTable {
  constructor(search) {
    this.placements = new Map();
    this.search = search;
    this.nowS = 0;
    search.addEventListener("input", () => this.show(this.nowS));
  }

  restart(placements) {
    this.placements.clear();
    this.add(placements);
  }

  // An attempt comes when it is placed, and again when it ended.
  add(placements) {
    for (const placement of placements) {
      const { choice_id: id, attempt, at_s: atS } = placement;
      this.placements.set(`${id} ${attempt} ${atS}`, placement);
    }
    for (const key of this.placements.keys()) {
      if (this.placements.size <= MOST_PLACEMENTS) break;
      this.placements.delete(key);
    }
  }

  show(nowS) {
    this.nowS = nowS;
    const wanted = this.search.value.trim();
    const isWanted = (one) => one.choice_id.includes(wanted) || one.request_id.includes(wanted);
    const found = [...this.placements.values()].filter(isWanted).slice(-SHOWN_PLACEMENTS);
    showRows("placements", found.reverse().map((placement) => placementRow(placement, nowS)));
    const isNone = wanted !== "" && found.length === 0;
    document.getElementById("no-match").hidden = !isNone;
    document.getElementById("no-placements").hidden = this.placements.size > 0;
  }
}

function placementRow(placement, nowS) {
  const id = placement.request_id || placement.choice_id;
  const name = element("td", "name", id.slice(0, 14));
  name.title = `${placement.request_id} ${placement.choice_id}`.trim();
  if (placement.attempt > 1) name.append(element("small", "", ` attempt ${placement.attempt}`));
  const isOver = placement.outcome !== "";
  return element("tr", "",
    element("td", "number", shownAge(nowS - placement.at_s)), name,
    element("td", "", placement.prefill ?? NOTHING), element("td", "", placement.decode ?? NOTHING),
    element("td", "", isOver ? placement.outcome : "in progress"),
    element("td", "number", isOver ? shownNumber(placement.output_tokens) : NOTHING),
    element("td", "number", shownSpan(placement.duration_s)),
    element("td", "reason", placement.reason));
}

class ErrorTable {
  constructor() {
    this.errors = [];
  }

  restart(errors) {
    this.errors = errors.slice(-MOST_ERRORS);
  }

  add(errors) {
    this.errors = this.errors.concat(errors).slice(-MOST_ERRORS);
  }

  show(nowS) {
    const rows = [...this.errors].reverse().map((error) => {
      const name = element("td", "name", error.request_id.slice(0, 14));
      name.title = error.request_id;
      return element("tr", error.status >= 500 ? "is-failure" : "",
        element("td", "number", shownAge(nowS - error.at_s)), element("td", "", error.status),
        element("td", "", error.code), name, element("td", "", error.endpoint),
        element("td", "reason", error.text || NOTHING));
    });
    showRows("errors", rows);
  }
}

function showRows(id, rows) {
  const table = document.getElementById(id);
  table.tBodies[0].replaceChildren(...rows);
  table.parentElement.hidden = rows.length === 0;
  document.getElementById(`no-${id}`).hidden = rows.length > 0;
}

// How many nodes of each role the load wants, who changes roles, and the last change.
function showRoles(scaling) {
  const roles = Object.entries(scaling.roles).filter(([, role]) => role.nodes || role.desired);
  const parts = roles.map(([name, role]) => `${name} ${role.desired} (${role.nodes} there)`);
  const texts = [`For this load: ${parts.join(", ")}.`];
  if (scaling.auto_roles) texts.push(scaling.leader ? `${scaling.leader} changes roles.` : "No router changes roles now.");
  const last = scaling.changes[0];
  if (last) texts.push(`${last.node_id} became ${last.role} ${shownAge(last.age_s)} ago.`);
  byId("roles").hidden = parts.length === 0;
  setText(byId("roles"), texts.join(" "));
}

function showNotices({ trouble, warnings, is_store_away: isAway }) {
  const notices = [];
  if (trouble) notices.push(`Requests have nowhere to run: ${trouble}.`);
  if (isAway && !trouble) notices.push("The placement store is away: no node can join until it is back.");
  notices.push(...warnings.map((warning) => `${warning}.`));
  const list = document.getElementById("notices");
  const isSame = notices.length === list.children.length
    && notices.every((notice, index) => list.children[index].textContent === notice);
  if (!isSame) list.replaceChildren(...notices.map((notice) => element("li", "", notice)));
}

function showSampleRequest(model) {
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "Say hello." }] });
  const command = `curl ${location.origin}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '${body}'`;
  setText(document.getElementById("sample-request"), command);
}
