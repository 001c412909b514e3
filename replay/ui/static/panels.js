// What the side panel shows: record and plan, state, explanation, comparison, what if.

import { count, h, ms, plain, seconds } from "./dom.js";

const table = (head, rows) =>
  h("table", {}, h("thead", {}, h("tr", {}, head.map((name) => h("th", { class: name.startsWith("#") ? "n" : null }, name.replace("#", ""))))), h("tbody", {}, rows));
const cell = (value, numeric = false) => h("td", { class: numeric ? "n" : null }, value ?? "–");
const pair = (name, value) => h("div", {}, h("span", {}, name), h("b", {}, value));

export function link(app, rid, epoch = 0, choice = 0) {
  const number = app.numberOf([rid, epoch, choice]);
  const text = plain(rid) + (choice ? ` #${choice}` : "");
  return number < 0 ? h("span", { title: text }, text) : h("button", { class: "link", title: text, onclick: () => app.select(number) }, text);
}

const request = (app, row) => h("td", { class: "rid" }, link(app, row.rid, row.epoch, row.choice));
const phase = (name) => h("span", { class: `phase ${name.toLowerCase()}` }, name.toLowerCase());

export function record(app) {
  const at = app.moment;
  if (!at) return [h("p", { class: "soft" }, "…")];
  const parts = [];
  if (at.plan) {
    const plan = at.plan;
    const here = plan.seq === at.seq;
    parts.push(h("h3", {}, here ? "The plan decided here" : plan.flying ? "The plan in flight" : "The last plan, done", " · step ", plan.step ?? "none", " · record ", h("button", { class: "link", onclick: () => app.go(plan.seq) }, count(plan.seq))));
    const raw = plan.raw;
    const joined = (raw.join ?? []).filter(Array.isArray);
    const facts = [
      ["rows", plan.rows ? plan.rows.length : null], ["input tokens", plan.rows ? plan.rows.reduce((sum, row) => sum + row.length, 0) : null],
      ["joined", joined.length || null], ["cached tokens found", joined.reduce((sum, row) => sum + row[3], 0) || null],
      ["preempted slots", raw.preempt?.join(", ")], ["pages evicted", raw.evict?.reduce((sum, row) => sum + (row[2]?.length ?? 0), 0)],
      ["pages grown", raw.grow?.reduce((sum, row) => sum + (row[1]?.length ?? 0), 0)], ["operations", raw.ops?.length], ["ends", raw.ends?.length],
    ].filter(([, value]) => value != null && value !== "");
    parts.push(h("div", { class: "grid2" }, facts.map(([name, value]) => pair(name, value))));
    if (plan.rows?.length) {
      const joins = new Set(joined.map((row) => row[0]));
      parts.push(table(["request", "#slot", "#from", "#tokens", ""], plan.rows.map((row) =>
        h("tr", {}, request(app, row), cell(row.slot, true), cell(row.start, true), cell(row.length, true), h("td", {}, phase(row.chunk ? "prefill" : "decode"), joins.has(row.slot) ? " joins" : "")))));
    }
  }
  if (at.reasons.length) {
    parts.push(h("h3", {}, "Who did not run, and why"), h("ul", { class: "why" }, at.reasons.slice(0, 40).map((reason) => h("li", {}, link(app, reason.rid, reason.epoch, reason.choice), ": ", plain(reason.text)))));
    if (at.reasons.length > 40) parts.push(h("p", { class: "soft" }, `and ${at.reasons.length - 40} more`));
  }
  if (at.outputs.length) {
    parts.push(h("h3", {}, `Told to clients (${at.outputs.length})`), table(["request", "#position", "tokens", "end"], at.outputs.map((out) =>
      h("tr", {}, request(app, out), cell(out.position, true), cell(out.tokens.join(" ")), cell(plain(out.reason ?? "") + (out.error ? `: ${plain(out.error)}` : ""))))));
  }
  for (const [call, ok, info] of at.acks) parts.push(h("p", {}, `answered ${plain(call) || "a control call"}: ${ok ? "done" : "refused"} ${plain(info)}`));
  const { crc, seq, t, type, ...rest } = at.record;
  parts.push(h("h3", {}, "The record"), h("pre", {}, plain(JSON.stringify(rest, null, 1).replace(/\n\s*(?=-?\d|\])/g, " "))));
  return parts;
}

const FIGURES = ["gate", "running", "waiting", "live", "stopping", "in_flight", "pages_held", "pages_cached", "pages_free", "num_pages", "queued_tokens", "steps", "generation_tokens", "prompt_tokens", "prefix_hits", "prefix_queries", "preemptions", "failed_steps", "refused", "ignored", "executor_present", "incarnation"];

export function state(app) {
  const at = app.moment;
  if (!at) return [h("p", { class: "soft" }, "…")];
  const parts = [h("div", { class: "grid2" }, FIGURES.filter((name) => name in at.figures).map((name) => {
    const value = at.figures[name];
    return pair(name.replaceAll("_", " "), typeof value === "number" ? count(value) : plain(value));
  }))];
  for (const one of at.figures.controls) parts.push(h("p", {}, `${plain(one.type)} ${plain(one.call)} ${one.op == null ? "waits" : `is operation ${one.op}`}`));
  parts.push(h("h3", {}, `Live requests (${at.live_count})`));
  parts.push(table(["request", "phase", "#prompt", "#output", "#slot", "#pages"], at.live.map((row) =>
    h("tr", {}, request(app, row), h("td", {}, phase(row.phase)), cell(row.prompt_tokens, true), cell(row.output_tokens, true), cell(row.slot, true), cell(row.pages, true)))));
  if (at.live_count > at.live.length) parts.push(h("p", { class: "soft" }, `and ${at.live_count - at.live.length} more`));
  if (at.waiting.length) parts.push(h("h3", {}, "In line, in order"), h("p", {}, at.waiting.slice(0, 60).flatMap((rid, index) => [index ? ", " : "", link(app, rid)])));
  parts.push(h("h3", {}, "Limits"), h("div", { class: "grid2" }, Object.entries(at.config).filter(([, value]) => value != null).map(([name, value]) => pair(name.replaceAll("_", " "), plain(value)))));
  return parts;
}

export function why(app) {
  const life = app.about;
  if (!life) return [h("p", { class: "soft" }, "Select a request: click a lane, a page, or find one with /.")];
  const parts = [h("p", {}, h("b", {}, plain(life.label))), h("div", { class: "grid2" },
    pair("arrived", `record ${count(life.seq)}`), pair("at", seconds(life.t)), pair("prompt", `${count(life.prompt)} (${count(life.cached)} cached)`), pair("output", life.end >= 0 ? count(life.tokens) : `up to ${count(life.most)}`),
    pair("TTFT", ms(life.ttft_ms)), pair("TPOT", ms(life.tpot_ms)), pair("E2E", ms(life.e2e_ms)), pair("ended", plain(life.reason || "lives")))];
  const answer = app.explained;
  parts.push(h("h3", {}, `Up to record ${count(app.seq)}`));
  if (!answer) parts.push(h("p", { class: "soft" }, "looking…"));
  else {
    const told = [...answer.sentences, ...answer.outcome];
    parts.push(h("ul", { class: "why" }, (told.length ? told : ["Nothing held it back."]).map((text) => h("li", {}, plain(text)))));
    if (answer.divergence != null) parts.push(h("p", { class: "note" }, `Today's planner decides otherwise at record ${count(answer.divergence)}.`));
  }
  parts.push(h("h3", {}, "Its life"), table(["", "#from", "#for", "record"], life.spans.map(([kind, begin, end, seq]) =>
    h("tr", {}, h("td", {}, phase(kind)), cell(ms(begin), true), cell(ms(end - begin), true), h("td", {}, h("button", { class: "link", onclick: () => app.go(seq) }, count(seq)))))));
  parts.push(h("p", { class: "soft" }, "n and p go to its next and previous edge."));
  return parts;
}

const delta = (a, b) => (typeof a === "number" && typeof b === "number" ? h("td", { class: `n ${b > a ? "up" : "down"}` }, `${b > a ? "+" : ""}${count(Math.round((b - a) * 1000) / 1000)}`) : cell("", true));
const shown = (value) => (typeof value === "number" ? count(value) : plain(value ?? "–"));

export function compare(app) {
  if (!app.b) return [h("p", { class: "soft" }, "Put the second cursor somewhere with b, or shift-click in the strip or the lanes; it may be in another world."), h("p", { class: "soft" }, "x exchanges the two.")];
  const found = app.compared;
  if (!found) return [h("p", { class: "soft" }, "…")];
  const name = (world, side) => `${side}: record ${count(found[side.toLowerCase()].seq)}, ${seconds(found[side.toLowerCase()].t)}${world ? `, world ${world}` : ""}`;
  const parts = [h("p", {}, name(app.world, "A"), h("br"), name(app.b.world, "B")), h("p", {}, h("b", {}, found.same ? "The states are equal, to the digest." : `${found.figures.length} figures, ${found.request_count} requests and ${found.pages.length} pages differ.`))];
  if (found.figures.length) parts.push(table(["figure", "#A", "#B", "#"], found.figures.map(([what, a, b]) => h("tr", {}, cell(what.replaceAll("_", " ")), cell(shown(a), true), cell(shown(b), true), delta(a, b)))));
  if (found.requests.length) {
    const side = (row) => (row ? [phase(row.phase), ` ${row.output_tokens}`] : "not live");
    parts.push(h("h3", {}, "Requests, with output tokens"), table(["request", "A", "B"], found.requests.map((row) => h("tr", {}, request(app, row), h("td", {}, side(row.a)), h("td", {}, side(row.b))))));
  }
  return parts;
}

export function whatif(app) {
  const parts = [];
  if (app.world) {
    parts.push(h("p", { class: "note" }, `Hypothetical: ${plain(app.meta.worlds.find((one) => one.world === app.world)?.title ?? "")}. Today's planner decides from record ${count(app.kept + 1)} on.`));
    const found = app.differences;
    if (app.meta.error) parts.push(h("p", { class: "error" }, plain(app.meta.error)));
    if (!found) parts.push(h("p", { class: "soft" }, "folding…"));
    else {
      parts.push(table(["", "#recorded", "#hypothetical", "#"], found.answered.map(([what, a, b]) => h("tr", {}, cell(what), cell(shown(a), true), cell(shown(b), true), delta(a, b)))));
      if (app.meta.made_up) parts.push(h("p", { class: "soft" }, `${count(app.meta.made_up)} tokens are beyond what the log holds, and made up.`));
      parts.push(h("h3", {}, `Requests that were served otherwise (${found.count})`));
      const change = (a, b) => {
        if (a == null || b == null) return h("td", { class: "n" }, `${ms(a)} → ${ms(b)}`);
        return h("td", { class: "n" }, `${ms(a)} `, h("span", { class: b > a ? "up" : "down" }, Math.abs(b - a) < 0.05 ? "" : `${b > a ? "+" : "−"}${ms(Math.abs(b - a))}`));
      };
      if (found.rows.length) parts.push(table(["request", "#TTFT", "#E2E"], found.rows.map((row) => h("tr", {}, h("td", { class: "rid" }, h("button", { class: "link", title: plain(row.label), onclick: () => app.select(row.number) }, plain(row.label))), change(row.before?.ttft_ms, row.after?.ttft_ms), change(row.before?.e2e_ms, row.after?.e2e_ms)))));
    }
    parts.push(h("p", {}, h("button", { onclick: () => app.enter(0) }, "back to what was recorded")));
  }
  const at = app.moment;
  parts.push(h("h3", {}, `At record ${count(app.seq)}${at ? `, ${at.type}` : ""}`));
  const horizon = h("select", { id: "horizon" }, [[2000, "2,000 records"], [4000, "4,000 records"], [20000, "20,000 records"], [0, "to the end"]].map(([value, text]) => h("option", { value, selected: value === 4000 }, text)));
  const body = () => ({ world: app.world, seq: app.seq, horizon: Number(horizon.value) });
  parts.push(h("form", { onsubmit: (event) => event.preventDefault() }, h("label", {}, "fold on for", horizon), h("button", { type: "button", class: "primary", id: "skip", onclick: () => app.imagine({ ...body(), skip: true }) }, `leave record ${count(app.seq)} out`)));
  const kind = h("select", { id: "insert-type", onchange: () => fields() }, ["admit", "abort", "pause", "resume", "flush_cache", "reconfigure", "executor_lost"].map((name) => h("option", { value: name }, name)));
  const box = h("div");
  const insert = h("form", { onsubmit: (event) => { event.preventDefault(); app.imagine({ ...body(), event: read() }); } }, h("h3", {}, "or put an event in after it"), h("label", {}, "event", kind), box, h("button", { class: "primary", id: "insert" }, "put it in"));
  const inputs = {
    admit: [["rid", "what-if"], ["like", app.about?.rid ?? ""], ["prompt_tokens", 512], ["max_tokens", 64]], abort: [["rid", app.about?.rid ?? at?.live[0]?.rid ?? ""]],
    pause: [["mode", "wait"]], resume: [], flush_cache: [], reconfigure: [["set", '{"max_running": 8}']], executor_lost: [["error", "what if"]],
  };
  const numeric = new Set(["prompt_tokens", "max_tokens"]);
  function fields() {
    box.replaceChildren(...inputs[kind.value].map(([name, value]) => h("label", {}, name.replace("_", " "), h("input", { name, value, placeholder: name === "like" ? "a request to be like, or empty" : "" }))));
  }
  function read() {
    const event = { type: kind.value };
    for (const input of box.querySelectorAll("input")) {
      if (input.value === "") continue;
      event[input.name] = numeric.has(input.name) ? Number(input.value) : input.name === "set" ? parse(input.value) : input.value;
    }
    return event;
  }
  const parse = (text) => { try { return JSON.parse(text); } catch { return text; } };
  fields();
  parts.push(insert);
  if (app.refused) parts.push(h("p", { class: "error" }, plain(app.refused)));
  return parts;
}
