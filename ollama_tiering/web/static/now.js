// What `tiering top` and `tiering status` show, each second.

import { get } from "/api.js";
import { PARTS, bars, legend, strip } from "/charts.js";
import { age, clock, count, duration, el, number, share, size, table } from "/dom.js";

const SHOWN_REQUESTS = 10;
const CHART_REQUESTS = 60;
const WORTH_SECONDS = 10;

export async function now(main) {
  const sections = ["notes", "figures", "chart", "tiers", "requests", "models"].map((name) => el("section", { id: name }));
  const drawn = new Map();
  const draw = (section, value, children) => {
    const text = JSON.stringify(value);
    if (drawn.get(section) === text) return;
    drawn.set(section, text);
    section.replaceChildren(...children(value));
  };
  const look = async () => {
    const { status, flow, requests } = await get("live");
    const [notes, figures, chart, tiers, last, models] = sections;
    draw(notes, notesOf(status), (lines) => lines.map((line) => el("p", { class: "note" }, line)));
    draw(figures, [status.model_uses, status.saved_seconds, status.partings], () => figuresOf(status));
    draw(chart, requests, chartOf);
    draw(last, requests.slice(0, SHOWN_REQUESTS), requestsOf);
    draw(tiers, [status.tiers, flow, status.queued_demotions], () => tiersOf(status, flow));
    draw(models, [status.model_uses, status.runners], () => modelsOf(status));
    return `tiering ${status.version}, ${clock(Date.now() / 1000)}`;
  };
  const said = await look();
  main.replaceChildren(...sections);
  return { look, said };
}

function notesOf(status) {
  const notes = [...status.broken_builds];
  for (const runner of status.runners) {
    if (!runner.tiered) notes.push(`${runner.name || runner.model}: not tiered: ${runner.reason || "no reason given"}`);
  }
  for (const tier of status.tiers) {
    if (tier.disk_full) notes.push(`${tier.tier}: the disk is too full: nothing is written until others make room`);
    if (tier.state && tier.state !== "ok") notes.push(`${tier.tier}: ${tier.state}`);
  }
  const lost = status.partings;
  if (lost.lost_seconds > WORTH_SECONDS) {
    notes.push(`computed again in 24 h: ${duration(lost.lost_seconds)} in ${count(lost.requests, "prompt")}; see Computed again`);
  }
  return notes;
}

function figuresOf({ model_uses: uses, saved_seconds: saved }) {
  const sum = (name) => uses.reduce((total, use) => total + use[name], 0);
  const prompt = sum("prompt_tokens");
  const parts = { memory: sum("memory_tokens"), restored: sum("restored_tokens"), computed: sum("recomputed_tokens") };
  const figure = (value, words) => el("div", { class: "figure" }, el("b", {}, value), el("span", {}, words));
  return [
    el("div", { class: "figures" },
      figure(saved === null ? "?" : duration(saved), saved === null ? "saved: not measured yet" : "saved"),
      figure(number(sum("requests")), "requests"),
      figure(number(prompt), "prompt tokens"),
      PARTS.map(([kind, words]) => figure(share(parts[kind], prompt), words))),
    strip("where prompt tokens came from", prompt, Object.entries(parts)),
    legend(),
  ];
}

const partsOf = (request) =>
  ({ memory: request.memory_tokens, restored: request.restored_tokens, computed: request.computed_tokens });

function chartOf(requests) {
  if (!requests.length) return [el("p", { class: "quiet" }, "No request has ended since this page's server began.")];
  const items = requests.slice(0, CHART_REQUESTS).reverse().map((request) => ({
    parts: partsOf(request),
    hint: `${clock(request.unix_seconds)} ${request.model}: ${Object.entries(partsOf(request))
      .map(([kind, value]) => `${kind} ${number(value)}`).join(", ")}`,
  }));
  const ends = [`from ${items[0].hint.slice(0, 8)}`, `to ${items.at(-1).hint.slice(0, 8)}`];
  return [bars("Prompt tokens of the last requests", items, { words: (value) => count(value, "token"), ends, places: 30 })];
}

function requestsOf(requests) {
  if (!requests.length) return [];
  const before = (request) => (request.unseen ? `(${request.unseen} more before) ` : "");
  return [
    el("h2", {}, "Last requests"),
    table([
      ["Ended", (request) => clock(request.unix_seconds)],
      ["Model", (request) => request.model],
      ["Prompt", (request) => number(request.prompt_tokens), "right"],
      ["In memory", (request) => number(request.memory_tokens), "right"],
      ["Restored", (request) => number(request.restored_tokens), "right"],
      ["Computed", (request) => number(request.computed_tokens), "right"],
      ["Saved", (request) => savedOf(request.seconds_saved), "right"],
      ["Why not more", (request) => before(request) + request.why, "long"],
    ], requests, "Last requests"),
  ];
}

const savedOf = (seconds) => (seconds === null ? "?" : seconds ? duration(seconds) : "");

function tiersOf(status, flow) {
  const moves = [["restoring", flow.read], ["storing", flow.stored]].filter(([, rate]) => rate >= 1)
    .map(([words, rate]) => `${words} ${size(Math.round(rate))}/s`);
  if (status.queued_demotions) moves.push(`${size(status.queued_bytes)} still to be written to the disk`);
  return [
    el("h2", {}, "Tiers", el("small", { class: "quiet" }, moves.join(", "))),
    el("div", { class: "tiers" }, status.tiers.map((tier) => el("div", {},
      el("p", {}, el("b", {}, tier.tier), el("span", {}, `${size(tier.used_bytes)} of ${size(tier.budget_bytes)}`)),
      strip(`${tier.tier}: used`, tier.budget_bytes, [["restored", tier.used_bytes]]),
      el("p", { class: "quiet" }, el("span", {}, count(tier.blocks, "block")),
        el("span", {}, tier.read_bytes_per_second ? `read ${size(Math.round(tier.read_bytes_per_second))}/s` : ""))))),
  ];
}

function modelsOf({ model_uses: uses, runners }) {
  const heading = el("h2", {}, "Models");
  if (!uses.length) return [heading, el("p", { class: "quiet" }, "No model has reported a request yet.")];
  const speed = new Map(runners.map((runner) => [runner.namespace, runner.prefill_tokens_per_second]));
  const rows = [...uses].sort((a, b) => b.last_used_unix_seconds - a.last_used_unix_seconds);
  return [heading, table([
    ["Model", (use) => [use.name || use.model.slice(0, 19), use.loaded ? el("span", { class: "badge" }, "loaded") : null].flat()],
    ["Requests", (use) => number(use.requests), "right"],
    ["Prompt tokens", (use) => number(use.prompt_tokens), "right"],
    ["In memory", (use) => share(use.memory_tokens, use.prompt_tokens), "right"],
    ["Restored", (use) => share(use.restored_tokens, use.prompt_tokens), "right"],
    ["Computed", (use) => share(use.recomputed_tokens, use.prompt_tokens), "right"],
    ["Saved", (use) => (use.saved_seconds === null ? "?" : duration(use.saved_seconds)), "right"],
    ["Computes", (use) => (speed.get(use.namespace) ? `${number(speed.get(use.namespace))} tokens/s` : ""), "right"],
    ["Used", (use) => age(use.last_used_unix_seconds), "right"],
  ], rows, "Models")];
}
