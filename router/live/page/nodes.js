"use strict";
// A card for each node, kept while the node stays, in the column of its role.

const BLOCK_STATES = ["running", "reserved", "receiving", "quarantined", "cached", "free"];
const MOST_PIPS = 32;
const MANY_CARDS = 6;

class NodeCard {
  constructor(node) {
    this.name = element("h4", "", node.node_id);
    this.badges = element("span", "badges");
    this.bar = element("div", "blocks");
    this.bar.setAttribute("role", "img");
    this.parts = BLOCK_STATES.map((state) => element("i", state));
    this.bar.append(...this.parts);
    this.blocks = element("p", "told");
    this.tiers = element("div", "tiers");
    this.seats = element("p", "told");
    this.pips = element("div", "pips");
    this.pips.setAttribute("aria-hidden", "true");
    this.dock = element("div", "dock");
    this.speed = element("p", "told quiet");
    const head = element("div", "head", this.name, this.badges);
    this.card = element(
      "article", `card ${node.role}`, head, this.dock, this.bar, this.blocks, this.tiers, this.pips, this.seats, this.speed);
    this.name.title = node.address;
  }

  update(node) {
    this.node = node;
    const badges = [];
    if (node.role === "mixed") badges.push("mixed");
    if (node.is_draining) badges.push("draining");
    if (node.is_suspected) badges.push("suspected");
    setText(this.badges, badges.join(" · "));
    this.card.classList.toggle("is-draining", node.is_draining);
    this.card.classList.toggle("is-suspected", node.is_suspected);
    this.showBlocks(node);
    this.showTiers(node.tiers);
    this.showSeats(node);
    setText(this.speed, schedulingText(node));
  }

  showBlocks({ blocks, num_blocks: total }) {
    const told = [];
    BLOCK_STATES.forEach((state, index) => {
      this.parts[index].style.width = `${total ? (100 * blocks[state]) / total : 0}%`;
      if (blocks[state]) told.push(`${shownNumber(blocks[state])} ${state}`);
    });
    const text = `${shownNumber(total)} blocks: ${told.join(", ") || NOTHING}`;
    setText(this.blocks, text);
    this.bar.setAttribute("aria-label", text);
  }

  // A thinner bar for each tier below the pool.
  showTiers(tiers) {
    while (this.tiers.children.length < tiers.length) {
      const bar = element("div", "blocks below", element("i", "cached"));
      bar.setAttribute("role", "img");
      this.tiers.append(element("div", "", bar, element("p", "told")));
    }
    while (this.tiers.children.length > tiers.length) this.tiers.lastChild.remove();
    tiers.forEach(({ tier, held, size }, index) => {
      const [bar, told] = this.tiers.children[index].children;
      const text = `${shownNumber(held)} of ${shownNumber(size)} blocks in ${tier} hold prefixes`;
      bar.firstChild.style.width = `${(100 * held) / size}%`;
      bar.setAttribute("aria-label", text);
      setText(told, text);
    });
  }

  showSeats({ seats, used_seats: used, num_waiting: waiting, queued_tokens: queued }) {
    const few = seats <= MOST_PIPS;
    const wanted = few ? seats : 20;
    while (this.pips.children.length < wanted) this.pips.append(element("i", ""));
    while (this.pips.children.length > wanted) this.pips.lastChild.remove();
    const lit = few ? used : Math.ceil((used / seats) * wanted);
    [...this.pips.children].forEach((pip, index) => pip.classList.toggle("is-used", index < lit));
    let text = `${used} of ${counted(seats, "seat", "seats")} in use`;
    if (waiting) text += `, ${waiting} waiting`;
    // A sequence that decodes has one token to compute at any time: that is no backlog.
    if (queued > used) text += ` · ${counted(queued, "token", "tokens")} to compute`;
    setText(this.seats, text);
  }
}

function schedulingText(node) {
  const told = node.device ? [node.device] : [];
  if (node.num_preemptions) {
    const now = node.preemptions_per_s ? `, ${shownNumber(node.preemptions_per_s)} per second now` : "";
    told.push(`${counted(node.num_preemptions, "preemption", "preemptions")}${now}`);
  }
  if (node.num_drafted) {
    const share = shownShare(node.num_accepted / node.num_drafted);
    const now = node.acceptance === null ? "" : `, ${shownShare(node.acceptance)} now`;
    told.push(`${node.speculative_method}: ${share} of drafts accepted${now}`);
  }
  return told.join(" · ");
}

class NodeColumns {
  constructor() {
    this.cards = new Map();
    this.holders = { prefill: columnOf("prefill-column"), decode: columnOf("decode-column") };
  }

  update(nodes, total) {
    const seen = new Set();
    const byColumn = { prefill: [], decode: [] };
    for (const node of nodes) {
      const key = `${node.role} ${node.node_id} ${node.epoch}`;
      seen.add(key);
      if (!this.cards.has(key)) this.cards.set(key, new NodeCard(node));
      const card = this.cards.get(key);
      card.update(node);
      byColumn[node.role === "prefill" ? "prefill" : "decode"].push(card);
    }
    for (const key of this.cards.keys()) if (!seen.has(key)) this.cards.delete(key);
    for (const [name, holder] of Object.entries(this.holders)) holder.show(byColumn[name]);
    document.getElementById("no-nodes").hidden = nodes.length > 0;
    document.getElementById("columns").hidden = nodes.length === 0;
    document.getElementById("legend").hidden = nodes.length === 0;
    const title = total > nodes.length ? `Nodes (${nodes.length} of ${total} shown)` : "Nodes";
    setText(document.getElementById("cluster-title"), title);
  }

  byNodeId() {
    return new Map([...this.cards.values()].map((card) => [card.node.node_id, card]));
  }
}

function columnOf(id) {
  const column = document.getElementById(id);
  const cards = column.querySelector(".cards");
  const count = column.querySelector("small");
  return {
    show(wanted) {
      column.hidden = wanted.length === 0;
      setText(count, counted(wanted.length, "node", "nodes"));
      cards.classList.toggle("many", wanted.length > MANY_CARDS);
      const now = wanted.map((card) => card.card);
      const isSame = now.length === cards.children.length && now.every((card, i) => card === cards.children[i]);
      if (!isSame) cards.replaceChildren(...now);
    },
  };
}
