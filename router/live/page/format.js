"use strict";
// Numbers as a person reads them, and elements made of text only.

const NOTHING = "–";

function shownNumber(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (value >= 1e4) return `${(value / 1e3).toPrecision(3)} k`;
  if (value >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function shownSpan(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  if (seconds === 0) return "0 s";
  if (seconds < 0.01) return `${(seconds * 1e3).toPrecision(2)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1e3)} ms`;
  return seconds < 100 ? `${seconds.toPrecision(3)} s` : `${Math.round(seconds)} s`;
}

function shownBytes(count) {
  if (count === null || count === undefined) return NOTHING;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit === 0 || count >= 100 ? Math.round(count) : count.toPrecision(3)} ${units[unit]}`;
}

function shownBytesPerS(count) {
  return count === null ? NOTHING : `${shownBytes(count)}/s`;
}

function shownShare(share) {
  return share === null || share === undefined ? NOTHING : `${Math.round(share * 100)} %`;
}

function shownAge(seconds) {
  return seconds < 1.5 ? "now" : shownDuration(seconds);
}

function shownDuration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

function counted(count, one, many) {
  return `${shownNumber(count)} ${count === 1 ? one : many}`;
}

// Whatever the cluster says becomes a text node: nothing of it is ever read as HTML.
function element(tag, className, ...content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content.map((part) => (part instanceof Node ? part : String(part))));
  return made;
}

function svgElement(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}
