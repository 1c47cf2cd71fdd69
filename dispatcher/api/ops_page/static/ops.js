// The operators' page: times in the browser's zone, copying, and sections that refresh themselves. Everything also works
// without this script, except refreshing and copying.
"use strict";

(() => {
  const root = document.documentElement;
  root.classList.add("js");

  // --- Times ---------------------------------------------------------------------------------------------------------

  const two = (number) => String(number).padStart(2, "0");

  // Such as 2026-11-24 01:02:03 in the browser's zone. The title shows UTC.
  function localTime(at) {
    const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
    return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  }

  function showLocalTimes(within) {
    for (const element of within.querySelectorAll("time[datetime]:not([data-age])")) {
      const at = new Date(element.getAttribute("datetime"));
      if (!Number.isNaN(at.getTime())) element.textContent = localTime(at);
    }
  }

  // --- Copying -------------------------------------------------------------------------------------------------------

  async function copy(button) {
    const text = button.dataset.copy;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Without HTTPS, browsers have no clipboard: select the text, so that the keyboard can copy it.
      const code = button.previousElementSibling;
      if (!code) return;
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.classList.add("done");
    setTimeout(() => button.classList.remove("done"), 1500);
    announce("Copied");
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button.copy");
    if (button) copy(button);
  });

  // --- Charts --------------------------------------------------------------------------------------------------------

  // <figure class="chart" data-chart="…">: x in seconds since 1970, and one line (or bars) per series. A page with charts
  // includes "chart_head.html", and has a table with the same figures for visitors who cannot see the chart.
  const plots = new Map();
  const resized = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const plot = plots.get(target.closest("figure.chart"))?.plot;
      if (plot && contentRect.width > 0) plot.setSize({ width: Math.floor(contentRect.width), height: plot.height });
    }
  });

  function drawCharts() {
    if (!window.uPlot) return;
    for (const [figure, { plot }] of plots) {
      if (figure.isConnected) continue;
      plot.destroy();
      plots.delete(figure);
    }
    for (const figure of document.querySelectorAll("figure.chart[data-chart]")) drawChart(figure);
  }

  function drawChart(figure) {
    const text = figure.dataset.chart;
    const drawn = plots.get(figure);
    if (drawn?.text === text) return;
    const chart = JSON.parse(text);
    const data = [chart.x, ...chart.series.map((series) => series.values)];
    if (drawn && drawn.plot.series.length === data.length) {
      drawn.plot.setData(data);
      drawn.text = text;
      return;
    }
    drawn?.plot.destroy();
    const place = figure.querySelector(".plot");
    const width = Math.max(200, Math.floor(place.clientWidth));
    plots.set(figure, { text, plot: new uPlot(chartOptions(chart, width, place.clientHeight || 192), data, place) });
    resized.observe(place);
  }

  function chartOptions(chart, width, height) {
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue(name).trim();
    const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
    const axis = { stroke: colour("--ink-2"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: `12px ${style.getPropertyValue("--font")}` };
    const times = [
      // The shortest time between two labels in seconds, their format, and the second line when a new year or day begins.
      [28 * 86400, "{YYYY}-{MM}", null, null, null, null, null, null, 1],
      [86400, "{MM}-{DD}", "\n{YYYY}", null, null, null, null, null, 1],
      [60, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
      [1, "{HH}:{mm}:{ss}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
    ];
    const exact = (_plot, value) => (value == null ? "" : value.toLocaleString("en") + (chart.unit ? ` ${chart.unit}` : ""));
    return {
      width,
      height: height - 34, // the legend's height
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { y: { range: (_plot, _low, high) => [0, uPlot.rangeNum(0, high || 1, 0.1, true)[1]] } },
      axes: [{ ...axis, space: 60, values: times }, { ...axis, size: 48, space: 32, values: (_plot, values) => values.map((value) => compact.format(value)) }],
      series: [
        { label: "time", value: (_plot, seconds) => (seconds == null ? "" : localTime(new Date(seconds * 1000)).slice(0, 16)) },
        ...chart.series.map((series, index) => ({
          label: series.label,
          stroke: colour(`--chart-${series.colour ?? index + 1}`),
          fill: chart.bars ? colour(`--chart-${series.colour ?? index + 1}`) : undefined,
          paths: chart.bars ? uPlot.paths.bars({ size: [0.8, 40] }) : undefined,
          width: chart.bars ? 0 : 2,
          points: { show: false },
          value: exact,
        })),
      ],
    };
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const { plot } of plots.values()) plot.destroy();
    plots.clear();
    drawCharts();
  });

  // --- Refreshing ----------------------------------------------------------------------------------------------------

  const live = document.getElementById("live");
  const toggle = document.getElementById("live-toggle");
  const state = document.getElementById("live-state");
  const sections = () => document.querySelectorAll("[data-refresh]");
  let isPaused = sessionStorage.getItem("ops-paused") === "yes";
  let updatedAt = new Date();
  let problem = "";

  function announce(text) {
    if (state) state.textContent = text;
    setTimeout(showState, 2000);
  }

  function showState() {
    if (!live) return;
    live.hidden = sections().length === 0;
    toggle.textContent = isPaused ? "Resume updates" : "Pause updates";
    toggle.setAttribute("aria-pressed", String(isPaused));
    live.classList.toggle("stale", problem !== "");
    if (problem) state.textContent = problem;
    else if (isPaused) state.textContent = "Paused";
    else state.textContent = "";
  }

  function selectsIn(section) {
    const selection = getSelection();
    return !selection.isCollapsed && selection.containsNode(section, true);
  }

  // htmx asks every five seconds. A refresh is skipped in a hidden tab, while it is paused, and while the visitor
  // selects text in the section, because changed text would lose the selection.
  document.addEventListener("htmx:config:request", (event) => {
    const { ctx } = event.detail;
    if (ctx.sourceEvent?.type !== "every") return;
    if (document.hidden || isPaused || selectsIn(ctx.sourceElement)) event.preventDefault();
  });

  document.addEventListener("htmx:before:swap", (event) => {
    for (const task of event.detail.tasks) showLocalTimes(task.fragment);
  });

  document.addEventListener("htmx:after:swap", (event) => {
    if (event.detail.ctx.response?.status >= 400) return;
    updatedAt = new Date();
    problem = "";
    showState();
    drawCharts();
  });

  document.addEventListener("htmx:response:error", (event) => {
    const status = event.detail.ctx.response.status;
    problem = status === 401 ? "Your session has ended. Reload the page to sign in." : `Not updated since ${localTime(updatedAt).slice(11)} (error ${status}).`;
    showState();
  });

  document.addEventListener("htmx:error", () => {
    problem = `Not updated since ${localTime(updatedAt).slice(11)}: no connection.`;
    showState();
  });

  function refreshNow() {
    if (!window.htmx || isPaused) return;
    for (const section of sections()) htmx.trigger(section, "refresh", {}, false);
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) refreshNow();
  });

  toggle?.addEventListener("click", () => {
    isPaused = !isPaused;
    sessionStorage.setItem("ops-paused", isPaused ? "yes" : "no");
    showState();
    refreshNow();
  });

  function isTouched(form) {
    return [...form.elements].some((field) => {
      if (field === document.activeElement) return true;
      if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
      if (field.options) return [...field.options].some((option) => option.selected !== option.defaultSelected && option.defaultSelected);
      return "defaultValue" in field && field.value !== field.defaultValue;
    });
  }

  // A refresh changes the section's elements in place. It does not change a form that the visitor is using, and
  // it closes no <details> or <dialog> that the visitor has opened.
  window.htmx?.registerExtension("ops", {
    htmx_before_morph_node: (_element, { oldNode }) => !(oldNode.tagName === "FORM" && isTouched(oldNode)),
    htmx_before_morph_attr: (element, { attrName }) => !(attrName === "open" && /^(DETAILS|DIALOG)$/.test(element.tagName)),
  });

  // On a narrow screen, the navigation scrolls sideways.
  const current = document.querySelector(".main-nav [aria-current]");
  current?.closest("ul").scrollTo({ left: current.offsetLeft - 40 });
  showLocalTimes(document);
  showState();
  drawCharts();
})();
