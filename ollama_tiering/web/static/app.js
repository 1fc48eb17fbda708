// Which page is shown, and when it looks again.

import { conversations } from "/conversations.js";
import { el } from "/dom.js";
import { now } from "/now.js";
import { config, doctor, report, why } from "/pages.js";

const PAGES = { now, conversations, why, report, doctor, config };
const LOOK_MILLISECONDS = 1000;
const SAID_MILLISECONDS = 12000;
const main = document.getElementById("main");
const state = document.getElementById("state");
const sentence = document.getElementById("said");
let shown = { name: "", look: null };
let hush = 0;

// What was done, for a while. What is true of the page stands in `state`, and is read to nobody each second.
function say(words) {
  clearTimeout(hush);
  sentence.textContent = words;
  hush = setTimeout(() => { sentence.textContent = ""; }, SAID_MILLISECONDS);
}

function complain(error) {
  state.textContent = "";
  const lines = [el("p", {}, error.message), error.hint ? el("p", { class: "quiet" }, error.hint) : null];
  main.replaceChildren(el("section", { class: "error", role: "alert" }, lines.filter(Boolean)));
}

async function open() {
  const name = location.hash.slice(1) in PAGES ? location.hash.slice(1) : "now";
  const page = (shown = { name, look: null });
  for (const link of document.querySelectorAll("nav a")) {
    const current = link.hash === `#${name}`;
    if (!current) {
      link.removeAttribute("aria-current");
      continue;
    }
    link.setAttribute("aria-current", "page");
    document.title = `${link.textContent} – tiering`;
    link.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  sentence.textContent = "";
  main.setAttribute("aria-busy", "true");
  try {
    const fresh = el("div", {});
    const { look, said } = await PAGES[name](fresh, say);
    if (shown !== page) return;
    main.replaceChildren(fresh);
    page.look = look || null;
    state.textContent = said || "";
    performance.mark(`shown ${name}`);
  } catch (error) {
    if (shown === page) complain(error);
  } finally {
    if (shown === page) main.removeAttribute("aria-busy");
  }
}

// A page that cannot be asked is opened again as soon as it can.
async function look() {
  const page = shown;
  if (document.hidden || page.name !== "now") return;
  try {
    if (!page.look) return await open();
    const said = await page.look();
    if (shown === page) state.textContent = said;
  } catch (error) {
    if (shown !== page) return;
    page.look = null;
    complain(error);
  }
}

async function looking() {
  await look();
  setTimeout(looking, LOOK_MILLISECONDS);
}

addEventListener("hashchange", open);
document.addEventListener("visibilitychange", look);
addEventListener("unhandledrejection", (event) => {
  event.preventDefault();
  say(event.reason.hint ? `${event.reason.message} (${event.reason.hint})` : event.reason.message);
});
open().then(looking);
