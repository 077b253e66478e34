"use strict";
// Draws the charts, asks for the live part as soon as something changed, and says when control does not answer. Without it the
// pages work, but for the charts.

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Thresholds of bars go over the whole width, each with its name. A name that would stand on another one goes to its left.
function drawLines(lines, ink, paper) {
  return (chart) => {
    const { ctx, bbox } = chart, unit = devicePixelRatio;
    const placed = lines.map((line) => ({ label: line.label, y: Math.round(chart.valToPos(line.y, "y", true)) }));
    ctx.save();
    ctx.strokeStyle = ink;
    ctx.lineWidth = unit;
    ctx.setLineDash([6 * unit, 4 * unit]);
    ctx.font = `${12 * unit}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "bottom";
    for (const { y } of placed) {
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    const taken = [];
    for (const { label, y } of placed) {
      const width = ctx.measureText(label).width;
      let right = bbox.left + bbox.width - 4 * unit;
      const covered = () => taken.find((one) =>
        Math.abs(one.y - y) < 15 * unit && right > one.left && right - width < one.right);
      for (let other = covered(); other; other = covered()) right = other.left - 12 * unit;
      taken.push({ left: right - width, right, y });
      // The line of another threshold may go through it.
      ctx.fillStyle = paper;
      ctx.globalAlpha = 0.85;
      ctx.fillRect(right - width - 2 * unit, y - 15 * unit, width + 4 * unit, 14 * unit);
      ctx.globalAlpha = 1;
      ctx.fillStyle = ink;
      ctx.fillText(label, right, y - unit);
    }
    ctx.restore();
  };
}

function powersOfTen(low, high) {
  const found = [];
  const first = Math.ceil(Math.log10(low)), last = Math.floor(Math.log10(high));
  const step = Math.max(1, Math.ceil((last - first) / 8));
  for (let power = first; power <= last; power += step) found.push(10 ** power);
  return found;
}

function drawChart(figure) {
  const given = JSON.parse(figure.dataset.chart);
  const place = figure.querySelector(".plot");
  const ink = color("--ink"), faint = color("--line");
  const colors = ["--blue", "--orange", "--green", "--purple"].map(color);
  const bars = given.names.length > 0;
  const known = given.series.flatMap((one) => one.y).concat(given.lines.map((one) => one.y))
    .filter((y) => y !== null && (!given.log || y > 0));
  if (!known.length) return;
  place.replaceChildren();
  const low = Math.min(...known), high = Math.max(...known);
  const pad = (high - low || Math.abs(high) || 1) * 0.1;
  const range = given.log
    ? [10 ** Math.floor(Math.log10(low) - 0.2), 10 ** Math.ceil(Math.log10(high) + 0.2)]
    : [low - pad, high + pad];
  const edge = bars ? 0.6 : (given.x[given.x.length - 1] - given.x[0]) * 0.02 || 0.5;
  const xAxis = { stroke: ink, grid: { show: !bars, stroke: faint, width: 1 }, ticks: { stroke: faint } };
  const yAxis = { stroke: ink, grid: { stroke: faint, width: 1 }, ticks: { stroke: faint }, size: 64 };
  if (bars) Object.assign(xAxis, { splits: () => given.x, values: () => given.names, size: 40 });
  else Object.assign(xAxis, { label: given.xLabel, labelSize: 18, size: 34 });
  if (given.log) {
    yAxis.splits = () => powersOfTen(...range);
    yAxis.values = (chart, at) => at.map((y) => (y >= 1e5 || y < 1e-3 ? y.toExponential(0) : String(y)));
  }
  const series = given.series.map((one, i) => {
    const drawn = { label: one.label, stroke: colors[i % 4], width: 2, points: { show: given.x.length < 40, size: 6 } };
    if (bars) {
      Object.assign(drawn, { fill: colors[i % 4], points: { show: false } });
      drawn.paths = uPlot.paths.bars({ size: [0.5, 60] });
    }
    return drawn;
  });
  // On curves a name would cover what it is compared with: there a threshold is a curve of the legend.
  const thresholds = bars ? [] : given.lines;
  const level = ["--soft", "--red", "--orange", "--green"].map(color);
  const constant = thresholds.map((one, i) => (
    { label: one.label, stroke: level[i % 4], width: 1.5, dash: [6, 4], points: { show: false } }));
  new uPlot(
    {
      width: Math.max(260, place.clientWidth),
      height: 240,
      scales: {
        x: { time: false, range: () => [given.x[0] - edge, given.x[given.x.length - 1] + edge] },
        y: { distr: given.log ? 3 : 1, range: () => range },
      },
      cursor: { show: false },
      legend: { show: series.length + constant.length > 1, live: false },
      series: [{ label: given.xLabel }, ...constant, ...series],
      axes: [xAxis, yAxis],
      hooks: { draw: bars ? [drawLines(given.lines, ink, color("--paper"))] : [] },
    },
    [given.x, ...thresholds.map((one) => given.x.map(() => one.y)), ...given.series.map((one) => one.y)],
    place,
  );
}

function drawCharts() {
  document.querySelectorAll("figure[data-chart]").forEach(drawChart);
}

function sayOffline(away) {
  const banner = document.getElementById("offline");
  if (banner) banner.hidden = !away;
}

// Changes of `old` only what differs from `next`: what is the same stays the same element, so focus and selection stay, and a
// screen reader is told of nothing that is as it was. Children are found again by their id, those without one by their place.
function morph(old, next) {
  if (old.isEqualNode(next)) return;
  if (old.nodeType !== Node.ELEMENT_NODE) {
    old.nodeValue = next.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) if (!next.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of next.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const wanted = new Set([...next.children].map((one) => one.id).filter(Boolean));
  const named = new Map([...old.children].filter((one) => wanted.has(one.id)).map((one) => [one.id, one]));
  let at = old.firstChild;
  for (const child of [...next.childNodes]) {
    const same = named.get(child.id);
    if (same && same.nodeName === child.nodeName) {
      // What stands before it is taken out, not the other way round: an element that moves loses the focus.
      if (same.parentNode !== old) old.insertBefore(same, at);
      else {
        while (at !== same) {
          const passed = at;
          at = at.nextSibling;
          passed.remove();
        }
        at = same.nextSibling;
      }
      morph(same, child);
    } else if (at && !child.id && !at.id && at.nodeName === child.nodeName) {
      const before = at;
      at = at.nextSibling;
      morph(before, child);
    } else old.insertBefore(child, at);
  }
  while (at) {
    const last = at;
    at = at.nextSibling;
    last.remove();
  }
}

// The swap `morph` of htmx. The focus goes to the content when what had it is gone.
htmx.defineExtension("morph", {
  isInlineSwap: (style) => style === "morph",
  handleSwap: (style, target, fragment) => {
    if (style !== "morph" || !fragment.firstElementChild) return false;
    const focused = target.contains(document.activeElement) ? document.activeElement : null;
    morph(target, fragment.firstElementChild);
    if (focused && document.activeElement !== focused) {
      const again = (focused.id && document.getElementById(focused.id)) || document.getElementById("main");
      again.focus({ preventScroll: true });
    }
    return [target];
  },
});

// Only a page that is looked at holds a connection: a browser opens six to a host, and shares them among its windows.
function watchChanges() {
  const live = document.getElementById("live");
  if (!live) return;
  let source = null, seen = live.dataset.seq;
  const close = () => {
    if (source) source.close();
    source = null;
  };
  const look = () => {
    if (document.hidden) close();
    else if (!source) {
      source = new EventSource("/changed?after=" + seen);
      source.addEventListener("changed", (event) => {
        seen = event.data;
        htmx.trigger(document.body, "changed");
      });
    }
  };
  document.addEventListener("visibilitychange", look);
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", look);
  look();
}

document.addEventListener("DOMContentLoaded", () => {
  drawCharts();
  watchChanges();
  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(drawCharts, 150);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
  document.body.addEventListener("htmx:sendError", () => sayOffline(true));
  document.body.addEventListener("htmx:responseError", (event) => sayOffline(event.detail.xhr.status >= 500));
  document.body.addEventListener("htmx:afterRequest", (event) => {
    if (event.detail.successful) sayOffline(false);
  });
});
