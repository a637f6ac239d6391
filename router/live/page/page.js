"use strict";
// Reads the stream of snapshots, shows each, and comes back by itself when the stream ends.

const KEY = "pdserve.api-key";
const STALE_AFTER_MS = 4000;
const GIVE_UP_AFTER_MS = 10000;
const MOST_SAMPLES = 900;
const LONGEST_WAIT_MS = 5000;

const byId = (id) => document.getElementById(id);
const main = document.querySelector("main");
const keyForm = byId("key").querySelector("form");

const page = {
  samples: [],
  columns: [],
  heardAtMs: 0,
  stream: null,
  charts: makeCharts(byId("charts")),
  figures: makeFigures(byId("figures")),
  nodes: new NodeColumns(),
  flow: new Flow(byId("cluster"), byId("dots"), byId("links")),
  placements: new PlacementTable(byId("wanted-request")),
  errors: new ErrorTable(),
};

class KeyWanted extends Error {}

// The stream.

async function watch() {
  for (let failures = 0; ; failures += 1) {
    try {
      await readStream(() => { failures = 0; });
      if (failures === 0) continue; // a whole stream: the router lets everybody ask again at times
    } catch (error) {
      if (error instanceof KeyWanted) {
        await askForKey();
        failures = -1;
        continue;
      }
      showConnection("lost", lostText(error));
    }
    await sleep(Math.min(LONGEST_WAIT_MS, 250 * 2 ** failures));
  }
}

async function readStream(onNews) {
  page.stream = new AbortController();
  page.askedAtMs = performance.now();
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch("/v1/live", { headers, signal: page.stream.signal, cache: "no-store" });
  if (response.status === 401) throw new KeyWanted();
  if (!response.ok) throw new Error(await refusalText(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) show(JSON.parse(event.slice("data: ".length)));
    if (events.length) onNews();
  }
}

async function refusalText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the router answered with status ${response.status}`;
  }
}

function lostText(error) {
  const why = error instanceof TypeError || error.name === "AbortError" ? "the router does not answer" : error.message;
  return page.heardAtMs ? `${why}; what you see is old` : why;
}

// What came.

function show(event) {
  page.heardAtMs = performance.now();
  showConnection("live", "live");
  byId("key").hidden = true;
  main.hidden = false;
  if (event.kind === "history") {
    page.columns = event.columns;
    page.samples = event.samples.map(asSample);
    page.placements.restart(event.placements);
    page.errors.restart(event.errors);
  } else {
    showSnapshot(event);
  }
}

function showSnapshot(snapshot) {
  const sample = asSample(snapshot.sample);
  if (sample.at_s > (page.samples.at(-1)?.at_s ?? -1)) page.samples.push(sample);
  if (page.samples.length > MOST_SAMPLES) page.samples.shift();
  page.placements.add(snapshot.placements);
  page.errors.add(snapshot.errors);
  setText(byId("model"), snapshot.model);
  setText(byId("router"), `pdserve ${snapshot.version}, router ${snapshot.router_id}, running for `
    + `${shownDuration(sample.at_s)}. Requests and times are those of this router; `
    + "blocks, seats and rates of nodes are what each node reports.");
  const running = sample.placing + sample.prefill + sample.transfer + sample.decode;
  document.title = running ? `${running} running · pdserve` : "pdserve";
  page.figures(sample);
  showNotices(snapshot);
  showRoles(snapshot.scaling);
  showSampleRequest(snapshot.model);
  page.nodes.update(snapshot.nodes, snapshot.num_nodes);
  page.flow.update(page.nodes.byNodeId(), snapshot);
  byId("open-links").hidden = sessionStorage.getItem(KEY) !== null; // a link sends no key
  drawCharts();
  showPairs(snapshot.pairs, snapshot.nodes);
  page.placements.show(sample.at_s);
  page.errors.show(sample.at_s);
}

function drawCharts() {
  const longestSpanS = Number(byId("period").value);
  for (const chart of page.charts) chart.draw(page.samples, longestSpanS);
}

byId("period").addEventListener("change", drawCharts);

function asSample(row) {
  return Object.fromEntries(page.columns.map((name, index) => [name, row[index]]));
}

// What is said about the connection.

function showConnection(state, text) {
  const shown = byId("connection");
  shown.dataset.state = state;
  setText(shown.querySelector("span"), text);
  document.body.classList.toggle("is-stale", state !== "live" && page.heardAtMs > 0);
}

setInterval(() => {
  const nowMs = performance.now();
  const silentMs = nowMs - Math.max(page.heardAtMs, page.askedAtMs ?? 0);
  const isLive = byId("connection").dataset.state === "live";
  if (isLive && nowMs - page.heardAtMs > STALE_AFTER_MS) {
    showConnection("stale", `no news for ${shownAge((nowMs - page.heardAtMs) / 1000)}; what you see is old`);
  }
  if (silentMs > GIVE_UP_AFTER_MS) page.stream?.abort();
}, 1000);

// The key.

function askForKey() {
  const hadKey = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  main.hidden = true;
  byId("key").hidden = false;
  setText(byId("key-error"), hadKey ? "That key was refused." : "");
  showConnection("locked", "waiting for a key");
  byId("key-input").focus();
  return new Promise((resolve) => {
    keyForm.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, byId("key-input").value.trim());
      byId("key-input").value = "";
      showConnection("connecting", "connecting");
      resolve();
    };
  });
}

function sleep(ms) {
  return new Promise((resolve) => { setTimeout(resolve, ms); });
}

watch();
