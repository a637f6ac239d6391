"use strict";
// Small line charts over the samples. All share one span of time, which grows up to the chosen period,
// and one mark: pointing at a chart marks the same moment in all of them.

const CHART_WIDTH = 300;
const CHART_HEIGHT = 72;
const SHORTEST_SPAN_S = 60;
// A line is not drawn across seconds that nobody sampled.
const LONGEST_STEP_S = 5;

const CHARTS = [
  { title: "Time to first token", show: shownSpan, least: 0.01,
    lines: [["ttft_p50_s", "median", "one"], ["ttft_p99_s", "p99", "two"]] },
  { title: "Time per output token", show: shownSpan, least: 0.001,
    lines: [["tpot_p50_s", "median", "one"], ["tpot_p99_s", "p99", "two"]] },
  { title: "Output tokens per second", show: shownNumber, least: 10,
    lines: [["tokens_per_s", "", "one"]] },
  { title: "Requests in progress", show: shownNumber, least: 4,
    lines: [["prefill", "prefill", "prefill"], ["transfer", "transfer", "transfer"],
            ["decode", "decode", "decode"]] },
  { title: "KV moved per second", show: shownBytesPerS, least: 1000,
    lines: [["kv_bytes_per_s", "", "transfer"]] },
  { title: "Requests per second", show: shownNumber, least: 1,
    lines: [["requests_per_s", "ended", "one"], ["refusals_per_s", "refused (4xx)", "two"],
            ["failures_per_s", "failed (5xx)", "bad"]] },
  { title: "Preemptions per second", show: shownNumber, least: 1,
    lines: [["preemptions_per_s", "", "two"]] },
  { title: "Accepted drafts", show: shownShare, least: 1,
    lines: [["acceptance", "", "one"]] },
];

class LineChart {
  constructor({ title, show, least, lines }) {
    Object.assign(this, { title, show, least, lines, samples: [], marked: null });
    this.values = element("span", "values");
    this.top = element("span", "top");
    this.half = element("span", "half");
    this.begin = element("span", "begin");
    this.svg = svgElement("svg", {
      viewBox: `0 0 ${CHART_WIDTH} ${CHART_HEIGHT}`, preserveAspectRatio: "none", role: "img",
    });
    this.paths = lines.map(([, , name]) => svgElement("path", { class: name }));
    this.mark = svgElement("path", { class: "mark" });
    const middle = svgElement("path", { class: "middle", d: `M0 ${CHART_HEIGHT / 2}H${CHART_WIDTH}` });
    this.svg.append(middle, this.mark, ...this.paths);
    const axis = element("div", "axis", this.begin, element("span", "", "now"));
    const plot = element("div", "plot", this.top, this.half, this.svg);
    const caption = element("figcaption", "", element("span", "", title), this.values);
    this.figure = element("figure", "", caption, plot, axis);
    plot.addEventListener("pointermove", (event) => this.onPoint(this.pointed(event, plot)));
    plot.addEventListener("pointerleave", () => this.onPoint(null));
  }

  draw(samples, longestSpanS) {
    const latest = samples.at(-1);
    if (!latest) return;
    this.samples = samples.filter((sample) => latest.at_s - sample.at_s <= longestSpanS);
    const span = latest.at_s - this.samples[0].at_s;
    this.span_s = Math.min(Math.max(span, SHORTEST_SPAN_S), longestSpanS);
    const tops = this.lines.map(([key]) => highest(this.samples, key));
    this.highest = niceTop(Math.max(this.least, ...tops));
    this.lines.forEach(([key], index) => this.paths[index].setAttribute("d", this.path(key)));
    setText(this.top, this.show(this.highest));
    setText(this.half, this.show(this.highest / 2));
    setText(this.begin, `${shownAge(this.span_s)} ago`);
    this.tell();
  }

  path(key) {
    let path = "";
    let before = null;
    for (const sample of this.samples) {
      if (sample[key] === null) {
        before = null;
        continue;
      }
      const joins = before !== null && sample.at_s - before <= LONGEST_STEP_S;
      const y = CHART_HEIGHT - (sample[key] / this.highest) * CHART_HEIGHT;
      path += `${joins ? "L" : "M"}${this.x(sample).toFixed(1)} ${y.toFixed(1)}${joins ? "" : "h0"}`;
      before = sample.at_s;
    }
    return path;
  }

  x(sample) {
    const age = this.samples.at(-1).at_s - sample.at_s;
    return CHART_WIDTH * (1 - age / this.span_s);
  }

  pointed(event, plot) {
    if (!this.samples.length) return null;
    const box = plot.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * CHART_WIDTH;
    const distance = (sample) => Math.abs(this.x(sample) - x);
    return this.samples.reduce((a, b) => (distance(b) < distance(a) ? b : a));
  }

  markSample(sample) {
    this.marked = sample;
    this.tell();
  }

  tell() {
    const sample = this.marked ?? this.samples.at(-1);
    if (!sample) return;
    const told = this.lines.map(([key, label, name]) => {
      const value = element("span", name, label ? `${label} ` : "", element("b", "", this.show(sample[key])));
      return value;
    });
    if (this.marked) told.push(element("span", "", `${shownAge(this.samples.at(-1).at_s - sample.at_s)} ago`));
    this.values.replaceChildren(...told);
    this.mark.setAttribute("d", this.marked ? `M${this.x(sample).toFixed(1)} 0V${CHART_HEIGHT}` : "");
    const words = this.lines.map(([key, label]) => `${label} ${this.show(sample[key])}`.trim());
    this.svg.setAttribute("aria-label", `${this.title}: ${words.join(", ")}`);
  }
}

function highest(samples, key) {
  return samples.reduce((most, sample) => Math.max(most, sample[key] ?? 0), 0);
}

// The next of 1, 2 and 5 times a power of ten.
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.999);
}

function makeCharts(holder) {
  const charts = CHARTS.map((description) => new LineChart(description));
  for (const chart of charts) {
    chart.onPoint = (sample) => charts.forEach((one) => one.markSample(sample));
  }
  holder.replaceChildren(...charts.map((chart) => chart.figure));
  return charts;
}
