// Stacked bars. Labels are HTML, so that they stay readable however wide the picture is.

import { el, svg } from "/dom.js";

export const PARTS = [["memory", "in memory"], ["restored", "restored"], ["computed", "computed"]];

export const legend = () =>
  el("p", { class: "legend" },
    PARTS.map(([kind, words]) => el("span", {}, el("i", { class: `key ${kind}` }), words)));

// `items`: {parts: {memory: 5, …}, hint}, from left to right; at least `places` have room.
export function bars(title, items, { words, ends, places = 1 }) {
  const sums = items.map(({ parts }) => Object.values(parts).reduce((sum, value) => sum + value, 0));
  const most = Math.max(...sums, 0);
  const wide = Math.max(items.length, places);
  const picture = svg("svg", { viewBox: `0 0 ${wide} 100`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  items.forEach(({ parts, hint }, number) => {
    const place = wide - items.length + number;
    let top = 100;
    const rects = [svg("rect", { class: "back", x: place, y: 0, width: 1, height: 100 })];
    for (const [kind, value] of Object.entries(parts)) {
      const height = most ? (100 * value) / most : 0;
      top -= height;
      rects.push(svg("rect", { class: kind, x: place + 0.1, y: top, width: 0.8, height }));
    }
    const said = svg("title", {});
    said.textContent = hint;
    picture.append(svg("g", {}, said, ...rects));
  });
  return el("figure", {}, el("figcaption", {}, el("span", {}, title), el("span", {}, most ? `up to ${words(most)}` : "")),
    picture, el("p", { class: "ends" }, el("span", {}, ends[0]), el("span", {}, ends[1])));
}

// One bar that lies, of parts of a whole.
export function strip(title, whole, parts) {
  const picture = svg("svg", { class: "strip", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": title });
  let left = 0;
  for (const [kind, value] of parts) {
    const width = whole ? Math.min(100 - left, (100 * value) / whole) : 0;
    picture.append(svg("rect", { class: kind, x: left, y: 0, width, height: 10 }));
    left += width;
  }
  return picture;
}
