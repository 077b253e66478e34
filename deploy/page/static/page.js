"use strict";
// Draws the charts, asks for the live part as soon as something changed, and says when control does not answer. Without it the
// pages work, but for the charts.

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Thresholds go over the whole width, each with its name.
function drawLines(lines, ink) {
  return (chart) => {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = ink;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "bottom";
    const taken = [];
    for (const line of lines) {
      const y = Math.round(chart.valToPos(line.y, "y", true));
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      // A name that would stand on another one goes to its left.
      let x = bbox.left + bbox.width - 4;
      const width = ctx.measureText(line.label).width;
      const covered = () => taken.find((one) =>
        Math.abs(one.y - y) < 14 * devicePixelRatio && x > one.left && x - width < one.right);
      for (let other = covered(); other; other = covered()) x = other.left - 12 * devicePixelRatio;
      taken.push({ left: x - width, right: x, y });
      ctx.fillText(line.label, x, y - 2);
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
  new uPlot(
    {
      width: Math.max(260, place.clientWidth),
      height: 240,
      scales: {
        x: { time: false, range: () => [given.x[0] - edge, given.x[given.x.length - 1] + edge] },
        y: { distr: given.log ? 3 : 1, range: () => range },
      },
      cursor: { show: false },
      legend: { show: series.length > 1, live: false },
      series: [{ label: given.xLabel }, ...series],
      axes: [xAxis, yAxis],
      hooks: { draw: [drawLines(given.lines, ink)] },
    },
    [given.x, ...given.series.map((one) => one.y)],
    place,
  );
}

function drawCharts() {
  document.querySelectorAll("figure.chart").forEach(drawChart);
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
