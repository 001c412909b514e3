// The debugger: one place that knows where the cursors are; everything else draws what it holds.

import { $, h, count, ms, plain, seconds, tip } from "./dom.js";
import { get, newest, post } from "./api.js";
import { drawStrip, stripSeq } from "./strip.js";
import { drawLanes, laneAt } from "./lanes.js";
import { drawPages, expand, pageAt } from "./pages.js";
import * as panels from "./panels.js";

const app = {
  world: 0, seq: 1, b: null, span: 240, tab: "step", laneTop: 0, playing: false, kept: null,
  meta: null, strip: null, lanes: null, moment: null, map: null, numbers: new Map(), life: null, about: null,
  explained: null, compared: null, turned: null, differences: null, refused: "",

  window() {
    const half = Math.floor(this.span * 0.62);
    const top = Math.max(this.meta.last, this.meta.first + 1);
    const first = Math.max(this.meta.first, Math.min(this.seq - half, top - this.span + 1));
    return [first, first + this.span - 1];
  },
  numberOf([rid, epoch = 0, choice = 0]) {
    return this.numbers.get(JSON.stringify([rid, epoch, choice])) ?? -1;
  },
  go(seq) {
    const wanted = Math.max(this.meta.first, Math.min(this.meta.last, Math.round(seq)));
    if (!Number.isFinite(wanted)) return;
    this.seq = wanted;
    look();
  },
  async select(number, jump = false) {
    if (number == null || number < 0) return;
    this.life = { number };
    this.explained = null;
    try {
      this.about = await get("request", { world: this.world, life: number });
    } catch (error) {
      return say(error);
    }
    this.life = this.about;
    this.showLife = true;
    if (jump) this.go(this.about.seq);
    draw();
    explain(this.world, number, this.seq);
    panel();
  },
  async enter(world) {
    this.world = Number(world);
    this.kept = this.meta.worlds.find((one) => one.world === this.world)?.kept ?? null;
    this.differences = this.strip = this.lanes = null;
    this.life = this.about = null;
    await follow();
    this.go(this.seq);
  },
  async imagine(body) {
    this.refused = "";
    try {
      const made = await post("worlds", body);
      this.meta = await get("meta", { world: this.world });
      await this.enter(made.world);
      this.go(made.kept + 1);
    } catch (error) {
      this.refused = error.message;
      panel();
    }
  },
};
window.leftfold = app;

const say = (error) => ($("progress").textContent = plain(error.message));

const moment = newest((world, seq) => get("moment", { world, seq }), (found) => {
  app.moment = found;
  app.map = expand(found.pages);
  app.numbers = new Map(found.numbers.map(([rid, epoch, choice, number]) => [JSON.stringify([rid, epoch, choice]), number]));
  $("type").textContent = found.type;
  $("when").textContent = seconds(found.t);
  const { pages_held: held, pages_cached: cached, pages_free: free, num_pages: all } = found.figures;
  $("pages-count").textContent = `${count(held)} held (${count(found.pages.shared.length)} shared), ${count(cached)} cached, ${count(free)} free of ${count(all)}`;
  draw();
  panel();
}, say);

const lanes = newest((world, first, last) => get("lanes", { world, first, last }), (found) => { app.lanes = found; draw(); }, say);
const explain = newest((world, life, seq) => get("explain", { world, life, seq }), (found) => { app.explained = found; panel(); }, say);
const compared = newest((a_world, a, b_world, b) => get("compare", { a_world, a, b_world, b }), (found) => {
  app.compared = found;
  app.turned = new Set(found.pages);
  draw();
  panel();
}, say);

function look() {
  const seq = $("seq");
  if (document.activeElement !== seq) seq.value = app.seq;
  const [first, last] = app.window();
  const margin = Math.floor(app.span / 2);
  moment(app.world, app.seq);
  if (!app.lanes || app.lanes.first > Math.max(first, app.meta.first) || app.lanes.last < Math.min(last, app.meta.last)) {
    lanes(app.world, first - margin, last + margin);
  }
  if (app.about && app.tab === "why") explain(app.world, app.about.number, app.seq);
  if (app.b && app.tab === "compare") compared(app.world, app.seq, app.b.world, app.b.seq);
  else app.turned = null;
  draw();
}

let drawing = false;
function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    if (!app.meta) return;
    drawStrip(app);
    drawLanes(app);
    drawPages(app);
  });
}

const TABS = { step: panels.record, state: panels.state, why: panels.why, compare: panels.compare, whatif: panels.whatif };

function panel() {
  for (const tab of document.querySelectorAll("[data-tab]")) tab.setAttribute("aria-selected", tab.dataset.tab === app.tab);
  const box = $("panel");
  if (app.tab === "whatif" && box.contains(document.activeElement) && document.activeElement.matches("input, select")) return;
  box.replaceChildren(...TABS[app.tab](app));
}

function show(tab) {
  if (tab !== app.tab) $("panel").scrollTop = 0;
  app.tab = tab;
  document.activeElement?.blur?.();
  panel();
  look();
}

async function refresh() {
  const [meta, strip] = await Promise.all([get("meta", { world: app.world }), get("strip", { world: app.world, width: Math.round($("strip").clientWidth) })]);
  app.meta = meta;
  app.strip = strip;
  $("name").textContent = plain(meta.name);
  $("name").title = plain(meta.model);
  $("of").textContent = `of ${count(meta.last)}`;
  $("progress").textContent = meta.error ? plain(meta.error) : meta.done ? `${count(meta.requests)} requests, ${((meta.end - meta.begin) / 1e6).toFixed(1)} s` : `reading… ${count(meta.last)}${meta.expected ? ` of ${count(meta.expected)}` : ""}`;
  $("progress").className = meta.error ? "error" : "soft";
  $("hypothetical").hidden = !app.world;
  const worlds = $("worlds");
  worlds.replaceChildren(...meta.worlds.map((one) => h("option", { value: one.world, selected: one.world === app.world }, one.world ? `${one.world}: ${plain(one.title)}` : "recorded")));
  worlds.hidden = meta.worlds.length < 2;
  if (app.world && meta.done && !app.differences) {
    app.differences = await get("differences", { world: app.world });
    panel();
  }
  draw();
}

let timer = 0;
async function follow() {
  clearTimeout(timer);
  const before = app.meta?.last;
  try {
    await refresh();
    if (app.meta.last !== before && app.lanes && app.lanes.last < app.window()[1]) look();
  } catch (error) {
    say(error);
  }
  clearTimeout(timer);
  timer = setTimeout(follow, app.meta?.done ? 5000 : app.world ? 150 : 400);
}

function play(on = !app.playing) {
  app.playing = on;
  $("play").textContent = on ? "⏸" : "▶";
  if (on) tick();
}

function tick() {
  if (!app.playing) return;
  if (app.seq >= app.meta.last) return play(false);
  const speed = Number($("speed").value);
  let wait = 1000 / (speed || 1);
  if (!speed && app.lanes?.t) {
    const at = app.seq - app.lanes.first;
    wait = Math.max(16, Math.min(2000, (app.lanes.t[at + 1] - app.lanes.t[at]) / 1000 || 16));
  }
  setTimeout(() => {
    if (!app.playing) return;
    app.go(app.seq + 1);
    tick();
  }, wait);
}

async function jump(what, back, extra = {}) {
  try {
    const found = await get("jump", { world: app.world, seq: app.seq, what, back: back ? 1 : 0, ...extra });
    if (found.seq != null) {
      if (what === "edge") app.showLife = true;
      app.go(found.seq);
    }
  } catch (error) {
    say(error);
  }
}

function mark() {
  app.b = { world: app.world, seq: app.seq };
  show("compare");
}

function swap() {
  if (!app.b) return;
  const a = { world: app.world, seq: app.seq };
  const to = app.b;
  app.b = a;
  if (to.world !== app.world) {
    app.seq = to.seq;
    app.enter(to.world);
  } else app.go(to.seq);
}

function zoom(by) {
  app.span = Math.max(30, Math.min(4000, Math.round(app.span * by)));
  app.lanes = app.lanes && app.span > app.lanes.last - app.lanes.first ? null : app.lanes;
  look();
}

const leap = () => Math.max(10, Math.round(app.span / 12));
const DO = {
  first: () => app.go(app.meta.first), last: () => app.go(app.meta.last), back: () => app.go(app.seq - 1), forward: () => app.go(app.seq + 1),
  play: () => play(), mark, swap, narrow: () => zoom(0.66), widen: () => zoom(1.5),
};

const KEYS = [
  ["← →", "a record back, on", { ArrowLeft: DO.back, ArrowRight: DO.forward }],
  ["⇧← ⇧→", "a good part of the window", { "S-ArrowLeft": () => app.go(app.seq - leap()), "S-ArrowRight": () => app.go(app.seq + leap()) }],
  ["Home End", "first, last record", { Home: DO.first, End: DO.last }],
  ["space", "play, pause", { " ": () => play() }],
  ["[ ]", "decision before, after", { "[": () => jump("tick", true), "]": () => jump("tick", false) }],
  ["{ }", "control call, abort, loss, restart", { "{": () => jump("loud", true), "}": () => jump("loud", false) }],
  ["p n", "edge of the selected request", { p: () => edge(true), n: () => edge(false) }],
  ["g", "go to a record or a time (12.5s)", { g: () => { $("seq").focus(); $("seq").select(); } }],
  ["/", "find a request", { "/": () => { $("search").focus(); $("search").select(); } }],
  ["b x", "second cursor here; exchange", { b: mark, x: swap }],
  ["s", "leave this record out", { s: () => { app.tab = "whatif"; app.imagine({ world: app.world, seq: app.seq, skip: true, horizon: 4000 }); } }],
  ["W", "next world", { W: nextWorld, "S-W": nextWorld }],
  ["+ −", "fewer, more records", { "+": DO.narrow, "=": DO.narrow, "-": DO.widen }],
  ["↑ ↓", "scroll the lanes", { ArrowUp: () => scroll(-3), ArrowDown: () => scroll(3) }],
  ["1 … 5", "record, state, why, compare, what if", Object.fromEntries(Object.keys(TABS).map((tab, at) => [String(at + 1), () => show(tab)]))],
  ["esc", "nothing selected, nothing marked", { Escape: clear }],
  ["?", "this list", { "?": help, "S-?": help }],
];
const BOUND = Object.assign({}, ...KEYS.map(([, , bound]) => bound));

const edge = (back) => app.about && jump("edge", back, { life: app.about.number });
const scroll = (by) => { app.laneTop += by; draw(); };
function nextWorld() {
  const worlds = app.meta.worlds.map((one) => one.world);
  app.enter(worlds[(worlds.indexOf(app.world) + 1) % worlds.length]);
}
function clear() {
  app.life = app.about = app.explained = app.b = app.compared = app.turned = null;
  $("found").hidden = true;
  play(false);
  draw();
  panel();
}
function help() {
  const box = $("keys");
  if (box.open) return box.close();
  box.replaceChildren(h("h2", {}, "Shortcuts"), h("div", { class: "two" }, KEYS.map(([keys, text]) => h("div", {}, h("kbd", {}, keys), text))), h("p", { class: "soft" }, "Shift-click in the strip or the lanes puts the second cursor there. The log is only read: what if is folded beside it."));
  box.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !app.meta) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if ($("keys").open && event.key !== "?") return;
  const bound = BOUND[(event.shiftKey ? "S-" : "") + event.key] ?? BOUND[event.key];
  if (!bound) return;
  event.preventDefault();
  if (event.target.matches("button")) event.target.blur();
  bound();
});

for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", () => { DO[button.dataset.do](); button.blur(); });
for (const tab of document.querySelectorAll("[data-tab]")) tab.addEventListener("click", () => show(tab.dataset.tab));
$("help").addEventListener("click", help);
$("keys").addEventListener("click", (event) => event.target === $("keys") && $("keys").close());
$("worlds").addEventListener("change", (event) => { app.enter(event.target.value); event.target.blur(); });
$("seq").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  const text = event.target.value.trim().replaceAll(",", "");
  event.target.blur();
  if (/^\d+(\.\d+)?s$/.test(text)) jump("time", false, { t: Math.round(parseFloat(text) * 1e6) });
  else if (/^\d+$/.test(text)) app.go(Number(text));
  else event.target.value = app.seq;
});

// Searching

let picked = 0;
const found = newest((text) => get("search", { world: app.world, text }), ({ count: all, found: lives }) => {
  const list = $("found");
  const { left, bottom } = $("search").getBoundingClientRect();
  list.style.left = `${Math.min(left, innerWidth - 472)}px`;
  list.style.top = `${bottom + 4}px`;
  picked = 0;
  list.replaceChildren(...lives.map((life, at) => h("li", { "data-life": life.number, "aria-selected": at === 0, onmousedown: () => pick(life.number) },
    plain(life.label), h("small", {}, `record ${count(life.seq)}, ${seconds(life.t)} · prompt ${count(life.prompt)} · TTFT ${ms(life.ttft_ms)} · E2E ${ms(life.e2e_ms)} · ${life.reason || "lives"}${life.preempted.length ? ` · preempted ${life.preempted.length}×` : ""}`))),
    lives.length ? "" : h("li", { class: "soft" }, "no request of that name"), all > lives.length ? h("li", { class: "soft" }, `and ${all - lives.length} more`) : "");
  list.hidden = document.activeElement !== $("search");
}, say);
function pick(number) {
  $("found").hidden = true;
  $("search").blur();
  app.tab = "why";
  app.select(Number(number), true);
}
$("search").addEventListener("input", (event) => found(event.target.value));
$("search").addEventListener("focus", (event) => found(event.target.value));
$("search").addEventListener("blur", () => ($("found").hidden = true));
$("search").addEventListener("keydown", (event) => {
  const items = [...$("found").querySelectorAll("[data-life]")];
  if (event.key === "Enter" && items[picked]) return pick(items[picked].dataset.life);
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  event.preventDefault();
  picked = Math.max(0, Math.min(items.length - 1, picked + (event.key === "ArrowDown" ? 1 : -1)));
  items.forEach((item, at) => item.setAttribute("aria-selected", at === picked));
  items[picked]?.scrollIntoView({ block: "nearest" });
});

// Pointing

function point(event, seq) {
  if (seq == null || Number.isNaN(seq)) return;
  if (event.shiftKey) {
    app.b = { world: app.world, seq: Math.max(app.meta.first, Math.min(app.meta.last, seq)) };
    show("compare");
  } else app.go(seq);
}
$("strip").addEventListener("pointerdown", (event) => {
  $("strip").setPointerCapture(event.pointerId);
  point(event, stripSeq(app, event.clientX));
});
$("strip").addEventListener("pointermove", (event) => {
  if (event.buttons & 1) point(event, stripSeq(app, event.clientX));
});
$("lanes").addEventListener("pointerdown", (event) => {
  const { lane, seq } = laneAt(app, event);
  if (lane) app.select(lane.number);
  if (seq != null) point(event, seq);
});
$("lanes").addEventListener("pointermove", (event) => {
  const { lane, seq } = laneAt(app, event);
  if (event.buttons & 1 && seq != null) point(event, seq);
  tip(lane ? `${lane.label}\nrecords ${count(lane.seq)} to ${lane.end >= 0 ? `${count(lane.end)}, ${lane.reason}` : "…"}${lane.preempted.length ? `\npreempted ${lane.preempted.length}× here` : ""}` : "", event.clientX, event.clientY);
});
$("lanes").addEventListener("wheel", (event) => {
  event.preventDefault();
  if (event.ctrlKey) zoom(event.deltaY > 0 ? 1.2 : 0.83);
  else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) app.go(app.seq + Math.sign(event.deltaX || event.deltaY) * leap());
  else scroll(Math.sign(event.deltaY) * 2);
}, { passive: false });
$("pages").addEventListener("pointermove", (event) => tip(pageAt(app, event)?.text ?? "", event.clientX, event.clientY));
$("pages").addEventListener("pointerdown", (event) => {
  const key = pageAt(app, event)?.key;
  if (key) app.select(app.numberOf(key));
});
for (const canvas of ["lanes", "pages"]) $(canvas).addEventListener("pointerleave", () => tip(""));
new ResizeObserver(draw).observe(document.querySelector("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

$("lanes-keys").replaceChildren(...["waiting", "prefill", "decode", "preempted"].flatMap((kind) => [h("i", { class: `key ${kind}` }), kind]));

if (location.pathname.startsWith("/debug/")) {
  const again = async () => { await post("again", {}); location.reload(); };
  $("help").before(h("button", { title: "the log as it is now", onclick: again }, "read anew"));
}

async function begin() {
  panel();
  for (;;) {
    try {
      await refresh();
      if (app.meta.last >= app.meta.first) break;
      if (app.meta.done) return;
    } catch (error) {
      say(error);
    }
    await new Promise((done) => setTimeout(done, 60));
  }
  const asked = new URLSearchParams(location.hash.slice(1));
  app.go(Number(asked.get("seq")) || app.meta.first);
  performance.mark("shown");
  follow();
}
begin();
