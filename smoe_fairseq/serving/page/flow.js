// A sentence's tokens on their way through the strata of one layer: a strand for each, a dot where it stops.

import { level, piece, requested } from "./tokens.js";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 24; // pixels from strand to strand
const HEAD = 40; // above them
const GAP = 14; // between tokens that stop at a stratum and those that pass it by
const RADIUS = 9;

function shape(name, attributes = {}, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The height of each token at each stratum and, as at the last, behind it: those that stop are on top, the
// others below, both in the order of the sentence.
function heights(layer) {
  const tokens = layer.stops.map((_, index) => index);
  const columns = layer.strata.map((_, stratum) => {
    const stays = (index) => layer.stops[index].some((stop) => stop.stratum === stratum);
    const stopping = tokens.filter(stays);
    const passing = tokens.filter((index) => !stays(index));
    const column = [];
    stopping.forEach((index, row) => (column[index] = row * ROW));
    passing.forEach((index, row) => (column[index] = (stopping.length + row) * ROW + GAP));
    return column;
  });
  return [...columns, columns.at(-1)];
}

// A drawing of `width` pixels. `chosen(index, shape)` is called with the strand that is pointed at or tapped,
// and with null when it is left.
export function flow(side, layer, width, chosen) {
  const strata = layer.strata.length;
  const labels = Math.min(120, Math.round(width * 0.27));
  const letters = Math.floor((labels - 16) / 7);
  const step = (width - labels - 28) / strata;
  const x = (column) => labels + 14 + column * step;
  const ys = heights(layer).map((column) => column.map((y) => HEAD + ROW / 2 + y));
  const height = HEAD + side.tokens.length * ROW + GAP + 6;
  const svg = shape("svg", { class: "flow", viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", summary(layer));

  const narrow = step < 78;
  if (narrow) svg.append(shape("text", { class: "head label", x: labels, y: 14 }, "stratum"));
  svg.append(shape("text", { class: "head label", x: labels - (narrow ? 0 : 12), y: 29 }, "tokens"));
  layer.strata.forEach((_, stratum) => {
    const stops = layer.stops.filter((way) => way.some((stop) => stop.stratum === stratum)).length;
    const name = narrow ? stratum : `stratum ${stratum}`;
    svg.append(shape("text", { class: "head", x: x(stratum), y: 14 }, name));
    svg.append(shape("text", { class: "head", x: x(stratum), y: 29 }, `${stops}/${side.tokens.length}`));
    const end = HEAD + side.tokens.length * ROW + GAP;
    svg.append(shape("line", { class: "bar", x1: x(stratum), x2: x(stratum), y1: HEAD, y2: end }));
  });
  svg.append(shape("text", { class: "head", x: x(strata), y: 14 }, "out"));

  side.tokens.forEach((token, index) => {
    const strand = shape("g", {
      class: `strand level-${level(requested([layer], index), strata)}`,
      "data-token": index,
    });
    const way = path(ys.map((column, at) => [x(at), column[index]]));
    const start = ys[0][index];
    const text = piece(token);
    const short = text.length > letters ? `${text.slice(0, letters - 1)}\u2026` : text;
    strand.append(
      shape("path", { class: "hit", d: way }),
      shape("path", { class: "way", d: way }),
      shape("text", { class: "label", x: labels, y: start + 4 }, short),
    );
    for (const stop of layer.stops[index]) {
      const [cx, cy] = [x(stop.stratum), ys[stop.stratum][index]];
      strand.append(shape("circle", { cx, cy, r: RADIUS }));
      strand.append(shape("text", { class: "expert", x: cx, y: cy + 4 }, stop.first));
    }
    strand.addEventListener("pointerenter", () => chosen(index, strand));
    strand.addEventListener("pointerleave", () => chosen(null, strand));
    strand.addEventListener("click", () => chosen(index, strand));
    svg.append(strand);
  });
  return svg;
}

// A smooth line through points, level at each of them.
function path(points) {
  let d = `M${points[0][0]} ${points[0][1]}`;
  for (let i = 1; i < points.length; i++) {
    const [x0, y0] = points[i - 1];
    const [x1, y1] = points[i];
    const middle = (x0 + x1) / 2;
    d += `C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}`;
  }
  return d;
}

// What the picture says, for those who do not see it.
function summary(layer) {
  const counts = layer.strata.map((_, stratum) => {
    const there = layer.stops.filter((way) => way.some((stop) => stop.stratum === stratum)).length;
    return `${there} at stratum ${stratum}`;
  });
  return `Of ${layer.stops.length} tokens stop ${counts.join(", ")}`;
}

// Dims all strands but one; null: none.
export function point(svg, index) {
  svg.classList.toggle("choosing", index !== null);
  for (const strand of svg.querySelectorAll(".strand")) {
    strand.classList.toggle("chosen", index !== null && strand.dataset.token === String(index));
  }
}
