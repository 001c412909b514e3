// The page map: a cell for each page, coloured by who holds it; shared and cached ones look different.

import { $, colour, fit, hue, plain } from "./dom.js";

let place = { cell: 1, across: 1 };

export function expand(pages) {
  const owner = new Int32Array(pages.count);
  for (let at = 0, page = 0; at < pages.runs.length; at += 2) {
    owner.fill(pages.runs[at], page, page + pages.runs[at + 1]);
    page += pages.runs[at + 1];
  }
  return { owner, shared: new Map(pages.shared.map(([page, refs, by]) => [page, { refs, by }])), findable: new Set(pages.findable), owners: pages.owners };
}

const same = (a, life) => life && a[0] === life.rid && a[1] === life.epoch && a[2] === life.choice;

export function drawPages(app) {
  const { draw, width, height } = fit($("pages"));
  const map = app.map;
  if (!map) return;
  const total = map.owner.length;
  const [wide, high] = [width - 24, height - 12];
  let cell = Math.min(20, Math.floor(Math.sqrt((wide * high) / total)));
  while (cell > 2 && Math.ceil(total / Math.floor(wide / cell)) * cell > high) cell -= 1;
  cell = Math.max(2, cell);
  const across = Math.max(1, Math.floor(wide / cell));
  place = { cell, across };
  const gap = cell > 5 ? 1.5 : cell > 3 ? 1 : 0;
  const size = cell - gap;
  const hatch = pattern(draw, size);
  const changed = app.turned;
  for (let page = 0; page < total; page += 1) {
    const x = 12 + (page % across) * cell;
    const y = 2 + Math.floor(page / across) * cell;
    if (y > height) break;
    const owner = map.owner[page];
    if (owner === -1) {
      draw.fillStyle = colour("free");
      draw.fillRect(x, y, size, size);
    } else if (owner === -2) {
      draw.fillStyle = hatch;
      draw.fillRect(x, y, size, size);
    } else {
      const key = map.owners[owner];
      const mine = same(key, app.life) || map.shared.get(page)?.by.some((at) => same(map.owners[at], app.life));
      draw.fillStyle = hue(mine ? app.life.number : app.numberOf(key), app.life && !mine);
      draw.fillRect(x, y, size, size);
      if (map.findable.has(page) && cell > 7) {
        draw.fillStyle = colour("card");
        draw.beginPath();
        draw.moveTo(x + size, y);
        draw.lineTo(x + size - size / 3, y);
        draw.lineTo(x + size, y + size / 3);
        draw.fill();
      }
      if (map.shared.has(page)) {
        draw.strokeStyle = colour("shared");
        draw.lineWidth = cell > 9 ? 2 : 1;
        draw.strokeRect(x + draw.lineWidth / 2, y + draw.lineWidth / 2, size - draw.lineWidth, size - draw.lineWidth);
      }
    }
    if (changed?.has(page)) {
      draw.strokeStyle = colour("b");
      draw.lineWidth = 1.5;
      draw.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    }
  }
}

function pattern(draw, size) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 4;
  const ink = tile.getContext("2d");
  ink.fillStyle = colour("card");
  ink.fillRect(0, 0, 4, 4);
  ink.fillStyle = colour("cached");
  if (size < 4) ink.fillRect(0, 0, 4, 4);
  for (let at = 0; at < 4; at += 1) for (const next of [0, 1]) ink.fillRect((at + next) % 4, 3 - at, 1, 1);
  return draw.createPattern(tile, "repeat");
}

export function pageAt(app, event) {
  const { left, top } = $("pages").getBoundingClientRect();
  const across = Math.floor((event.clientX - left - 12) / place.cell);
  const page = Math.floor((event.clientY - top - 2) / place.cell) * place.across + across;
  if (across < 0 || across >= place.across || !app.map || page < 0 || page >= app.map.owner.length) return null;
  const owner = app.map.owner[page];
  const key = owner >= 0 ? app.map.owners[owner] : null;
  const shared = app.map.shared.get(page);
  const text = key
    ? `page ${page}: ${(shared ? shared.by.map((at) => app.map.owners[at]) : [key]).slice(0, 8).map(([rid, , choice]) => plain(rid) + (choice ? ` #${choice}` : "")).join("\n  ")}${shared?.by.length > 8 ? "\n  …" : ""}${app.map.findable.has(page) ? "\nfindable in the prefix cache" : ""}`
    : `page ${page}: ${owner === -2 ? "cached, nobody holds it" : "free"}`;
  return { page, key, text };
}
