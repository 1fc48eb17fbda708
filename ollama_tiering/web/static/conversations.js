// What `tiering ls` lists, with `pin`, `unpin` and `rm`.

import { change, get } from "/api.js";
import { age, count, el, number, size, table } from "/dom.js";

const AT_ONCE = 100;
const SORTS = {
  "last used": (chain) => -chain.last_use,
  newest: (chain) => -chain.created,
  largest: (chain) => -chain.file_bytes,
  longest: (chain) => -chain.tokens,
  "most hits": (chain) => -chain.hits,
};

export async function conversations(main, say) {
  let found = await get(`conversations?most=${AT_ONCE}`);  // the first picture waits for no more
  let most = AT_ONCE;
  const again = () => { most = AT_ONCE; draw(); };
  const search = el("input", { type: "search", placeholder: "words, model or ID", "aria-label": "Search", oninput: again });
  const sort = el("select", { "aria-label": "Order", onchange: again }, Object.keys(SORTS).map((name) => el("option", {}, name)));
  const pinned = el("input", { type: "checkbox", onchange: again });
  const list = el("div", {});
  const summary = el("p", { class: "quiet" });
  const buttons = (chain) => [
    el("button", { onclick: () => pin(chain), "aria-label": `${chain.pinned ? "Unpin" : "Pin"} ${short(chain)}` }, chain.pinned ? "Unpin" : "Pin"),
    el("button", { onclick: () => remove(chain), "aria-label": `Remove ${short(chain)}`, disabled: chain.pinned }, "Remove"),
  ];
  const short = (chain) => chain.id.slice(0, found.id_digits);

  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (chain) => words.every((word) => `${chain.text || ""} ${chain.model}`.toLowerCase().includes(word))
      || (words.length === 1 && chain.id.startsWith(words[0]));
    const chains = found.chains.filter((chain) => (!pinned.checked || chain.pinned) && fits(chain));
    const key = SORTS[sort.value];
    chains.sort((a, b) => key(a) - key(b));
    summary.textContent = chains.length === found.chains.length ? found.summary : `${number(chains.length)} of ${found.summary}`;
    const more = chains.length > most
      ? el("button", { onclick: () => { most = Infinity; draw(); } }, `Show all ${number(chains.length)}`) : "";
    list.replaceChildren(chains.length ? rows(chains.slice(0, most)) : el("p", { class: "quiet" }, "Nothing fits."), more);
  }

  const rows = (chains) => table([
    ["Conversation", (chain) => [el("span", { class: "words", title: chain.text }, chain.text || short(chain)), el("span", { class: "quiet" }, chain.model, notes(chain))], "long"],
    ["Tokens", (chain) => number(chain.tokens), "right"],
    ["Size", (chain) => size(chain.file_bytes), "right"],
    ["Own", (chain) => size(chain.own_bytes), "right"],
    ["Tiers", tiers],
    ["Used", (chain) => age(chain.last_use), "right"],
    ["Hits", (chain) => number(chain.hits), "right"],
    ["Change", buttons, "buttons"],
  ], chains, "Stored conversations");

  const notes = (chain) => [
    [chain.pinned, "pinned"], [chain.leased, "in use"], [!chain.complete, "broken"], [found.useless_here[chain.namespace], "other engine"],
  ].filter(([holds]) => holds).map(([, words]) => el("span", { class: "badge" }, words));

  async function pin(chain) {
    const done = await change("pin", { id: chain.id, unpin: chain.pinned });
    await reload(done.sentence);
  }

  async function remove(chain) {
    const planned = await change("remove", { id: chain.id, dry_run: true });
    if (!(await agreed(`${chain.text ? `“${chain.text}”: ` : ""}${planned.sentence}.`))) return;
    const done = await change("remove", { id: chain.id, dry_run: false });
    await reload(done.sentence);
  }

  async function reload(sentence) {
    found = await get("conversations");
    draw();
    say(sentence);
  }

  draw();
  if (found.stored.chains > AT_ONCE) {
    get("conversations").then((all) => { found = all; draw(); performance.mark("all conversations"); });
  }
  main.replaceChildren(
    el("form", { class: "tools", onsubmit: (event) => event.preventDefault() }, search, sort, el("label", {}, pinned, " only pinned")),
    summary, list);
  return { said: count(found.stored.chains, "conversation") };
}

// `ram 3/24 local`: a tier without a number has all of it.
const tiers = (chain) =>
  chain.tiers.map((use) => (use.blocks === chain.blocks ? use.tier : `${use.tier} ${use.blocks}/${chain.blocks}`)).join(" ");

function agreed(words) {
  const dialog = document.getElementById("question");
  document.getElementById("question-words").textContent = words;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
