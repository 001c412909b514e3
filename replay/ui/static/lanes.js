// Lanes: a row for each request that lives in the window, spans coloured by what it is doing; the records' types below.

import { $, colour, fit, hue, plain, seconds } from "./dom.js";

const NAMES = 148;
const FOOT = 34;
export const ROW = 17;

function lanesIn(app) {
  const [first, last] = app.window();
  return app.lanes ? app.lanes.lanes.filter((lane) => lane.seq <= last && (lane.end < 0 || lane.end >= first)) : [];
}

export function drawLanes(app) {
  const { draw, width, height } = fit($("lanes"));
  const found = app.lanes;
  if (!found) return;
  const [first, last] = app.window();
  const wide = width - NAMES - 10;
  const x = (seq) => NAMES + ((seq - first) / (last - first + 1)) * wide;
  const rows = Math.floor((height - FOOT) / ROW);
  const alive = lanesIn(app);
  if (app.showLife && app.life) {
    const at = alive.findIndex((lane) => lane.number === app.life.number);
    if (at >= 0) {
      app.showLife = false;
      if (at < app.laneTop || at >= app.laneTop + rows) app.laneTop = at - Math.floor(rows / 2);
    }
  }
  app.laneTop = Math.max(0, Math.min(app.laneTop, alive.length - rows));
  const shown = alive.slice(app.laneTop, app.laneTop + rows);
  draw.font = "11.5px system-ui, sans-serif";
  draw.textBaseline = "middle";
  shown.forEach((lane, row) => {
    const y = row * ROW;
    if (lane.number === app.life?.number) {
      draw.fillStyle = colour("accent");
      draw.globalAlpha = 0.14;
      draw.fillRect(0, y, width, ROW);
      draw.globalAlpha = 1;
    } else if (row % 2) {
      draw.fillStyle = colour("sunk");
      draw.fillRect(0, y, width, ROW);
    }
    draw.fillStyle = hue(lane.number);
    draw.beginPath();
    draw.roundRect(8, y + 4, 9, 9, 2.5);
    draw.fill();
    draw.fillStyle = colour("ink");
    draw.fillText(short(draw, plain(lane.label), NAMES - 30), 23, y + ROW / 2 + 0.5);
    lane.spans.forEach(([kind, seq], at) => {
      const next = lane.spans[at + 1]?.[1] ?? (lane.end >= 0 ? lane.end : last + 1);
      const left = Math.max(NAMES, x(Math.max(seq, first)));
      const right = Math.min(NAMES + wide, x(next));
      if (right < NAMES || left > NAMES + wide) return;
      draw.fillStyle = colour(app.meta.kinds[kind]);
      const thin = kind === 0 || kind === 3;
      draw.globalAlpha = kind === 0 ? 0.75 : 1;
      draw.fillRect(left, y + (thin ? 6 : 3), Math.max(1.5, right - left), ROW - (thin ? 12 : 6));
      draw.globalAlpha = 1;
    });
    if (lane.first >= first && lane.first <= last) dot(x(lane.first + 0.5), y + ROW / 2, "card", 2.4);
    for (const at of lane.preempted) dot(x(at + 0.5), y + ROW / 2, "preempted", 3.5);
    if (lane.end >= first && lane.end <= last) {
      draw.fillStyle = lane.reason === "length" || lane.reason === "stop" ? colour("ink") : colour("preempted");
      draw.fillRect(x(lane.end), y + 2, 2, ROW - 4);
    }
  });
  function dot(at, y, name, size) {
    draw.fillStyle = colour(name);
    draw.beginPath();
    draw.arc(at, y, size, 0, 7);
    draw.fill();
  }
  foot(app, draw, found, x, height, wide, first, last);
  if (app.kept != null && app.kept < last) {
    draw.fillStyle = colour("hypo-ink");
    draw.globalAlpha = 0.08;
    draw.fillRect(Math.max(NAMES, x(app.kept + 1)), 0, width, height);
    draw.globalAlpha = 1;
  }
  const line = (seq, fill) => {
    if (seq < first || seq > last) return;
    draw.fillStyle = fill;
    draw.fillRect(x(seq + 0.5) - 0.75, 0, 1.5, height - 14);
  };
  if (app.b && app.b.world === app.world) line(app.b.seq, colour("b"));
  line(app.seq, colour("accent"));
  const more = alive.length - rows;
  const hidden = found.count - found.lanes.length;
  $("lanes-count").textContent = `${alive.length} in records ${first.toLocaleString("en-US")}–${last.toLocaleString("en-US")}${more > 0 ? `, scroll for ${more} more` : ""}${hidden > 0 ? `, the last ${found.lanes.length} shown` : ""}`;
}

const MARKS = { tick: "prefill", forward_done: "decode", admit: "waiting" };

function foot(app, draw, found, x, height, wide, first, last) {
  const top = height - FOOT + 3;
  draw.fillStyle = colour("soft");
  draw.textBaseline = "alphabetic";
  draw.fillText("records", 23, top + 9);
  if (found.codes) {
    found.codes.forEach((code, at) => {
      const seq = found.first + at;
      if (seq < first || seq > last) return;
      const name = app.meta.events[code];
      draw.fillStyle = colour(MARKS[name] ?? "preempted");
      draw.globalAlpha = MARKS[name] ? 0.75 : 1;
      draw.fillRect(x(seq), top, Math.max(0.8, wide / (last - first + 1) - 0.6), 10);
    });
    draw.globalAlpha = 1;
  }
  draw.fillStyle = colour("soft");
  const every = Math.max(1, Math.ceil((last - first + 1) / 5));
  for (let seq = first; seq <= last; seq += every) {
    const t = found.t?.[seq - found.first];
    draw.fillText(`${seq.toLocaleString("en-US")}${t == null ? "" : ` · ${seconds(t)}`}`, x(seq), height - 6);
  }
}

function short(draw, text, most) {
  if (draw.measureText(text).width <= most) return text;
  let kept = text;
  while (kept.length > 4 && draw.measureText(`${kept}…`).width > most) kept = kept.slice(0, -2);
  return `${kept.slice(0, Math.ceil(kept.length / 2))}…${text.slice(text.length - Math.floor(kept.length / 2))}`;
}

export function laneAt(app, event) {
  const { left, top, width } = $("lanes").getBoundingClientRect();
  const [first, last] = app.window();
  const at = (event.clientX - left - NAMES) / (width - NAMES - 10);
  const seq = Math.floor(first + at * (last - first + 1));
  return { lane: lanesIn(app)[app.laneTop + Math.floor((event.clientY - top) / ROW)], seq: at < 0 ? null : Math.max(first, Math.min(last, seq)) };
}
