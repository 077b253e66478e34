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
    for (const line of lines) {
      const y = Math.round(chart.valToPos(line.y, "y", true));
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.fillText(line.label, bbox.left + bbox.width - 4, y - 2);
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
