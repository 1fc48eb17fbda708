// Elements out of values, and numbers as people read them. Text only ever becomes text.

export function el(name, properties, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export const number = (value) => Math.round(value).toLocaleString("en-US");

export function count(value, word) {
  return `${number(value)} ${word}${value === 1 ? "" : "s"}`;
}

export const share = (part, whole) => (part ? `${Math.round((100 * part) / whole)} %` : "–");

// As format_size of ollama_tiering/config/sizes.py.
export function size(bytes) {
  if (bytes && bytes % 1e6 === 0) {
    for (const [unit, factor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6]]) {
      if (bytes >= factor && (bytes * 10) % factor === 0) return `${(bytes / factor).toFixed(1)} ${unit}`;
    }
  }
  for (const [unit, factor] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]]) {
    if (bytes >= factor) return `${(bytes / factor).toFixed(1)} ${unit}`;
  }
  return `${bytes} B`;
}

// As duration of ollama_tiering/protocol/seconds_saved.py.
export function duration(seconds) {
  const sign = seconds < 0 ? "-" : "";
  const left = Math.abs(seconds);
  if (left < 1) return `${sign}${left.toFixed(2)} s`;
  if (left < 9.95) return `${sign}${left.toFixed(1)} s`;
  const whole = Math.round(left);
  if (whole < 60) return `${sign}${whole} s`;
  if (whole < 3600) return `${sign}${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${sign}${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

// As age of ollama_tiering/cli/store_options.py.
export function age(unixSeconds) {
  const seconds = Math.max(0, Date.now() / 1000 - unixSeconds);
  for (const [unit, length, from] of [["w", 604800, 8], ["d", 86400, 1], ["h", 3600, 1], ["m", 60, 1]]) {
    if (seconds >= length * from) return `${Math.floor(seconds / length)}${unit}`;
  }
  return `${Math.floor(seconds)}s`;
}

export const clock = (unixSeconds) => new Date(unixSeconds * 1000).toTimeString().slice(0, 8);

// `columns`: [heading, value of a row, class]. A cell says its heading where a row becomes a card.
export function table(columns, rows, caption) {
  const heads = columns.map(([heading, , kind]) => el("th", { scope: "col", class: kind }, heading));
  const body = rows.map((row) =>
    el("tr", {}, columns.map(([heading, value, kind]) =>
      el("td", { class: kind, "data-heading": heading }, value(row)))));
  return el("table", {}, el("caption", { class: "unseen" }, caption),
    el("thead", {}, el("tr", {}, heads)), el("tbody", {}, body));
}

// What differs stands between ⟪ and ⟫.
export function marked(text) {
  const [start, stop] = [text.indexOf("⟪"), text.lastIndexOf("⟫")];
  if (start < 0 || stop <= start) return [text];
  return [text.slice(0, start), el("mark", {}, text.slice(start + 1, stop) || " "), text.slice(stop + 1)];
}
