// The operators' page: the browser's time zone, copying, shortcuts, and sections that refresh themselves. Everything else
// works without this script; times are then in UTC.
"use strict";

(() => {
  const root = document.documentElement;
  root.classList.add("js");

  // --- Times ---------------------------------------------------------------------------------------------------------

  // The server writes and reads times in the zone of this cookie: the browser's, or UTC if the visitor chose it.
  const zone = root.dataset.zone;
  const browserZone = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
  const keptZone = () => /(?:^|; )dispatcher-ops-zone=([^;]*)/.exec(document.cookie)?.[1];
  const zoneSwitch = document.getElementById("zone-switch");

  function keepZone(name) {
    const secure = location.protocol === "https:" ? "; secure" : "";
    document.cookie = `dispatcher-ops-zone=${name}; path=${root.dataset.path}; max-age=31536000; samesite=strict${secure}`;
    return keptZone() === name;
  }

  if (![browserZone, "UTC"].includes(keptZone()) && keepZone(browserZone) && document.querySelector("main :is(time, figure)")) location.reload();

  if (zoneSwitch && browserZone !== "UTC") {
    const other = keptZone() === "UTC" ? browserZone : "UTC";
    zoneSwitch.textContent = `Use ${other}`;
    zoneSwitch.hidden = false;
    zoneSwitch.addEventListener("click", () => keepZone(other) && location.reload());
  }

  // Such as 2026-11-24 01:02:03: Swedish writes times as ISO 8601 does.
  const localTime = (at) => at.toLocaleString("sv-SE", { timeZone: zone });

  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

  function showAges() {
    for (const element of document.querySelectorAll("time[data-age]")) {
      const seconds = (Date.now() - new Date(element.getAttribute("datetime"))) / 1000;
      const [size, unit] = units.find(([each]) => Math.abs(seconds) >= each) ?? [1, "s"];
      const length = `${Math.floor(Math.abs(seconds) / size)} ${unit}`;
      element.textContent = Math.abs(seconds) < 1 ? "now" : seconds > 0 ? `${length} ago` : `in ${length}`;
    }
  }

  setInterval(showAges, 30_000);

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
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), zone),
      cursor: { y: false, drag: { x: false, y: false } },
      // uPlot would show years around a single time.
      scales: { x: { range: (plot, low, high) => (plot.data[0].length === 1 ? [low - 3600, low + 60] : [low, high]) }, y: { range: (_plot, _low, high) => [0, uPlot.rangeNum(0, high || 1, 0.1, true)[1]] } },
      axes: [{ ...axis, space: 60, values: times }, { ...axis, size: 48, space: 32, values: (_plot, values) => values.map((value) => compact.format(value)) }],
      series: [
        { label: "time", value: (_plot, seconds) => (seconds == null ? "" : localTime(new Date(seconds * 1000)).slice(0, 16)) },
        ...chart.series.map((series, index) => ({
          label: series.label,
          stroke: colour(`--chart-${series.colour ?? index + 1}`),
          fill: chart.bars ? colour(`--chart-${series.colour ?? index + 1}`) : undefined,
          paths: chart.bars ? uPlot.paths.bars({ size: [0.8, 40] }) : undefined,
          width: chart.bars ? 0 : 2,
          points: { show: (plot) => plot.data[0].length === 1 },
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

  // --- Shortcuts -----------------------------------------------------------------------------------------------------

  const shortcuts = document.getElementById("shortcuts");
  const keysButton = document.getElementById("keys");
  let previousKey = "";

  function moveInList(step) {
    const links = [...document.querySelectorAll("main tbody tr")].map((row) => row.querySelector("a.key, a[href]")).filter(Boolean);
    const current = links.findIndex((link) => link.closest("tr").contains(document.activeElement));
    links[current < 0 ? 0 : Math.min(Math.max(current + step, 0), links.length - 1)]?.focus();
  }

  document.addEventListener("keydown", (event) => {
    if (event.key === "k" && (event.ctrlKey || event.metaKey) && document.getElementById("find")) {
      event.preventDefault();
      document.getElementById("find").focus();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog[open]")) return;
    const key = previousKey === "g" ? `g ${event.key}` : event.key;
    const acts = {
      "/": () => document.getElementById("find")?.focus(),
      "g e": () => location.assign(`${root.dataset.path}emails`),
      "g d": () => location.assign(`${root.dataset.path}dead-letters?status=failed`),
      "g a": () => location.assign(`${root.dataset.path}audit`),
      j: () => moveInList(1),
      k: () => moveInList(-1),
      "?": () => shortcuts?.showModal(),
    };
    previousKey = event.key;
    if (!(key in acts)) return;
    event.preventDefault();
    acts[key]();
  });

  // Reason fields suggest the last reasons of this tab.
  const reasons = JSON.parse(sessionStorage.getItem("ops-reasons") ?? "[]");
  const reasonList = document.createElement("datalist");
  reasonList.id = "last-reasons";
  reasonList.append(...reasons.map((text) => new Option(text)));
  document.body.append(reasonList);
  for (const input of document.querySelectorAll("input[name=reason]")) input.setAttribute("list", reasonList.id);
  document.addEventListener("submit", (event) => {
    if (event.target.action.endsWith("/sign-out")) sessionStorage.removeItem("ops-reasons");
    const text = event.target.elements.reason?.value.trim();
    if (text) sessionStorage.setItem("ops-reasons", JSON.stringify([...new Set([text, ...reasons])].slice(0, 8)));
  });

  // From an email back to the search that led to it.
  const back = document.querySelector("a[data-back]");
  if (back && document.referrer.split("?")[0] === back.href) back.href = document.referrer;

  if (keysButton) {
    keysButton.hidden = false;
    keysButton.addEventListener("click", () => shortcuts.showModal());
  }

  // On a narrow screen, the navigation scrolls sideways, and filters are folded.
  if (matchMedia("(max-width: 600px)").matches) for (const each of document.querySelectorAll("details.filters")) each.open = false;
  for (const current of document.querySelectorAll("nav [aria-current]")) current.closest("ul")?.scrollTo({ left: current.offsetLeft - 40 });
  showState();
  drawCharts();
})();
