"use strict";
// Requests as dots: on the card of their prefill node, on their way, on the card of their decode node.

const DOT_STEP = 12;
const MOST_PASSING = 24;
const PASSING_MS = 1800;
const PULL_ASIDE = 14;
const HEAD = 9;

class Flow {
  constructor(holder, dots, links) {
    Object.assign(this, { holder, dots, links, byId: new Map(), last: null });
    new ResizeObserver(() => this.last && this.place(...this.last)).observe(holder);
  }

  update(cards, snapshot) {
    this.last = [cards, snapshot];
    this.place(cards, snapshot);
    const shown = new Set(snapshot.requests.map((request) => request.id));
    const quick = snapshot.placements.filter((p) => p.prefill && p.decode && !shown.has(p.choice_id));
    for (const placement of quick.slice(-MOST_PASSING)) this.pass(cards, placement);
  }

  place(cards, { requests, pairs }) {
    this.origin = this.holder.getBoundingClientRect();
    this.places = new Map();
    const taken = new Map();
    const seen = new Set();
    for (const request of requests) {
      const spot = this.spot(cards, request, taken);
      if (!spot) continue;
      seen.add(request.id);
      this.move(request, spot);
    }
    for (const [id, dot] of this.byId) if (!seen.has(id)) this.remove(id, dot);
    this.drawLinks(cards, pairs);
  }

  // Where a request is, in pixels of the holder; null when there is no room or no such card.
  spot(cards, { id, phase, prefill, decode }, taken) {
    const to = cards.get(decode);
    const from = cards.get(prefill);
    if (phase === "transfer" && from && to) {
      const [a, b] = [this.middle(from), this.middle(to)];
      const aside = (hashOf(id) % 25) - 12;
      return { x: (a.x + b.x) / 2 + aside, y: (a.y + b.y) / 2 + aside };
    }
    const card = phase === "decode" ? to : from ?? to;
    if (!card) return null;
    const dock = this.box(card.dock);
    const perRow = Math.max(1, Math.floor(dock.width / DOT_STEP));
    const slot = taken.get(card) ?? 0;
    taken.set(card, slot + 1);
    const row = Math.floor(slot / perRow);
    if ((row + 1) * DOT_STEP > dock.height + 1) return null;
    return { x: dock.x + (slot % perRow) * DOT_STEP + 5, y: dock.y + row * DOT_STEP + 6 };
  }

  move({ id, phase }, { x, y }) {
    let dot = this.byId.get(id);
    const goal = `translate(${x.toFixed(1)}px, ${y.toFixed(1)}px)`;
    if (!dot) {
      dot = element("i", "dot");
      dot.style.transform = `translate(${(x - 30).toFixed(1)}px, ${y.toFixed(1)}px)`;
      this.dots.append(dot);
      this.byId.set(id, dot);
      dot.getBoundingClientRect(); // so that the way from there is seen
    }
    dot.dataset.phase = phase;
    dot.style.transform = goal;
  }

  remove(id, dot) {
    this.byId.delete(id);
    dot.dataset.phase = "gone";
    setTimeout(() => dot.remove(), 600);
  }

  // A request that came and went between two snapshots still crosses once.
  pass(cards, { prefill, decode }) {
    const [from, to] = [cards.get(prefill), cards.get(decode)];
    if (!from || !to) return;
    const [a, b] = [this.box(from.dock), this.box(to.dock)];
    const dot = element("i", "dot passing");
    dot.dataset.phase = "transfer";
    const at = (box) => `translate(${(box.x + 5).toFixed(1)}px, ${(box.y + 6).toFixed(1)}px)`;
    dot.style.transform = at(a);
    this.dots.append(dot);
    dot.getBoundingClientRect();
    dot.style.transform = at(b);
    setTimeout(() => dot.remove(), PASSING_MS);
  }

  drawLinks(cards, pairs) {
    const lines = [];
    for (const pair of pairs) {
      const [from, to] = [cards.get(pair.prefill), cards.get(pair.decode)];
      if (!from || !to) continue;
      // A node of another role sends, or a prefill node receives, what was pulled.
      const isPull = from.node.role !== "prefill" || to.node.role === "prefill";
      const isBusy = pair.bytes_per_s > 0;
      if (isPull && !isBusy) continue;
      const { way, head } = wayBetween(this.box(from.card), this.box(to.card), isPull ? PULL_ASIDE : 0);
      const name = isPull ? "pull" : isBusy ? "busy" : pair.is_connected ? "idle" : "closed";
      lines.push(svgElement("path", { d: isPull ? `${way} ${head}` : way, class: name }));
    }
    this.links.replaceChildren(...lines);
  }

  middle(card) {
    const { x, y, width, height } = this.box(card.card);
    return { x: x + width / 2, y: y + height / 2 };
  }

  // Measured once for each drawing: a measurement between two changes costs a layout.
  box(target) {
    let box = this.places.get(target);
    if (!box) {
      const { left, top, width, height } = target.getBoundingClientRect();
      box = { x: left - this.origin.left, y: top - this.origin.top, width, height };
      this.places.set(target, box);
    }
    return box;
  }
}

function hashOf(text) {
  let hash = 7;
  for (const letter of text) hash = (hash * 31 + letter.codePointAt(0)) % 65521;
  return hash;
}

// The path of a line from one box to another, and of the head of an arrow at its end.
function wayBetween(a, b, aside) {
  const [y1, y2] = [a.y + a.height / 2 + aside, b.y + b.height / 2 + aside];
  const toRight = b.x > a.x + a.width;
  if (toRight || b.x + b.width < a.x) {
    const [x1, x2] = toRight ? [a.x + a.width, b.x] : [a.x, b.x + b.width];
    const [middle, back] = [(x1 + x2) / 2, toRight ? x2 - HEAD : x2 + HEAD];
    const head = `M${back} ${y2 - HEAD / 2}L${x2} ${y2}L${back} ${y2 + HEAD / 2}`;
    return { way: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`, head };
  }
  const isBelow = b.y > a.y;
  const [x1, x2] = [a.x + a.width / 2 + aside, b.x + b.width / 2 + aside];
  const [from, to] = isBelow ? [a.y + a.height, b.y] : [a.y, b.y + b.height];
  const back = isBelow ? to - HEAD : to + HEAD;
  return {
    way: `M${x1} ${from}L${x2} ${to}`,
    head: `M${x2 - HEAD / 2} ${back}L${x2} ${to}L${x2 + HEAD / 2} ${back}`,
  };
}
