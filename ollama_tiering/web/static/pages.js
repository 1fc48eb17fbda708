// What `tiering why`, `report`, `doctor`, `status` and `config` show.

import { get } from "/api.js";
import { bars, legend } from "/charts.js";
import { duration, el, marked, number, share, size, table } from "/dom.js";

export async function why(main) {
  const { causes, last_line: last } = await get("why");
  main.replaceChildren(...causes.map(({ headline, rows }) =>
    el("article", {}, el("h2", {}, headline), el("dl", {}, rows.flatMap(([label, words]) => [
      el("dt", {}, label), el("dd", { class: label }, label === "stored" || label === "prompt" ? marked(words) : words)])))),
  el("p", { class: "quiet" }, last));
  return {};
}

export async function report(main) {
  const content = el("div", {});
  const days = el("select", { "aria-label": "Days", onchange: () => draw() },
    [7, 30, 90, 400].map((value) => el("option", { value, selected: value === 30 }, `${value} days`)));
  async function draw() {
    content.replaceChildren(...reportOf(await get(`report?days=${days.value}`)));
  }
  await draw();
  main.replaceChildren(el("form", { class: "tools" }, days), content);
  return {};
}

function reportOf({ calendar, days, models, all }) {
  const ends = [calendar[0], calendar.at(-1)];
  const of = (date) => days[date] || { memory_tokens: 0, restored_tokens: 0, recomputed_tokens: 0, saved_seconds: 0 };
  const tokens = calendar.map((date) => {
    const sums = of(date);
    const parts = { memory: sums.memory_tokens, restored: sums.restored_tokens, computed: sums.recomputed_tokens };
    return { parts, hint: [date, ...Object.entries(parts).map(([kind, value]) => `${kind} ${number(value)}`)].join(", ") };
  });
  const saved = calendar.map((date) =>
    ({ parts: { saved: Math.max(0, of(date).saved_seconds) }, hint: `${date}, saved ${duration(of(date).saved_seconds)}` }));
  const columns = (heading) => [
    [heading, ([name]) => name],
    ["Requests", ([, sums]) => number(sums.requests), "right"],
    ["Prompt tokens", ([, sums]) => number(sums.prompt_tokens), "right"],
    ["In memory", ([, sums]) => share(sums.memory_tokens, sums.prompt_tokens), "right"],
    ["Restored", ([, sums]) => share(sums.restored_tokens, sums.prompt_tokens), "right"],
    ["Computed", ([, sums]) => share(sums.recomputed_tokens, sums.prompt_tokens), "right"],
    ["Saved", ([, sums]) => (sums.restored_tokens ? duration(sums.saved_seconds) : "–"), "right"],
    ["Parted", ([, sums]) => (sums.partings ? number(sums.partings) : "–"), "right"],
    ["Written", ([, sums]) => (sums.written_bytes ? size(sums.written_bytes) : "–"), "right"],
  ];
  return [
    el("h2", {}, `${duration(all.saved_seconds)} saved`),
    bars("Prompt tokens of each day", tokens, { words: (value) => `${number(value)} tokens`, ends }), legend(),
    bars("Time saved each day", saved, { words: duration, ends }),
    el("h2", {}, "Models"), table(columns("Model"), [...Object.entries(models), ["all", all]], "Models"),
    el("h2", {}, "Days"), table(columns("Day"), Object.entries(days).reverse(), "Days"),
  ];
}

export async function doctor(main) {
  const { checks, status } = await get("doctor");
  const bad = checks.filter((check) => check.state !== "ok");
  const lines = (some) => el("ul", { class: "checks" }, some.map((check) => el("li", {},
    el("span", { class: `badge ${check.state}` }, check.state), el("b", {}, check.name), ` ${check.finding}`,
    check.cure ? el("p", { class: "cure" }, check.cure) : null)));
  main.replaceChildren(
    ...(bad.length ? [el("h2", {}, "To look at"), lines(bad)] : []),
    el("h2", {}, "In order"), lines(checks.filter((check) => check.state === "ok")),
    el("h2", {}, "All that the sidecar says"), el("pre", { tabindex: "0" }, status.join("\n")));
  return {};
}

export async function config(main) {
  const { settings, shown, file, exists, error } = await get("config");
  const rows = Object.entries(settings);
  const chosen = rows.filter(([, { origin }]) => origin !== "default");
  const lines = (some, caption) => table([
    ["Setting", ([key]) => el("b", {}, key), "name"],
    ["Value", ([key]) => shown[key], "long"],
    ["Comes from", ([, { origin }]) => origin, "long"],
    ["Variable", ([, { variable }]) => (variable ? el("code", {}, variable) : ""), "name"],
  ], some, caption);
  main.replaceChildren(
    ...(error ? [el("p", { class: "note" }, error)] : []),
    ...(chosen.length ? [el("h2", {}, "Set"), lines(chosen, "Settings that are set")] : []),
    el("h2", {}, "Defaults"), lines(rows.filter((row) => !chosen.includes(row)), "Settings that have their default"),
    el("p", { class: "quiet" }, `file: ${file}${exists ? "" : " (not there)"}`));
  return {};
}
