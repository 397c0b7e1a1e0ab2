// The page: what is asked for, what comes back, and the numbers beside it.

import { ApiError, call, events, setKey } from "./api.js";
import { bars, line, map, mapRows } from "./charts.js";
import { ORIGINS, TokenView } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const FEED_POINTS = 240;
const VISIBLE_STEPS = 200;

let model = null; // GET /v1/models
let running = null; // the AbortController of what is under way
let conversation = []; // messages of a chat
let traced = null; // {view, index, layers, position}
const texts = new TokenView($("text"), pick);
const left = new TokenView($("left"), pick), right = new TokenView($("right"), pick);

// ---- what is asked for

const isChat = () => document.querySelector("input[name=kind]:checked").value === "chat";
const drafts = () => ($("proposer").value === "off" ? 0 : Number($("k").value));

function settings(k) {
  const seed = $("seed").value;
  return {
    model: model.id,
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    ...(seed === "" ? {} : { seed: Number(seed) }),
    ...(model.speculative.k ? { speculation: { k } } : {}),
  };
}

/** The prompt's tokens, and what to send for it. */
async function prompt(signal) {
  const text = $("input").value;
  if (!text) throw new ApiError("write something first", 0);
  const messages = isChat() ? [...conversation, { role: "user", content: text }] : null;
  const asked = messages ? { messages } : { prompt: text };
  const found = await call("/tokenize", { ...asked, return_token_strs: true }, signal);
  const path = messages ? "/v1/chat/completions" : "/v1/completions";
  return { ids: found.tokens, texts: found.token_strs, path, body: messages ? { messages } : { prompt: found.tokens }, messages };
}

// ---- what comes back

/** Run once and show the tokens as they come. Returns the text and the server's numbers. */
async function stream(view, asked, options, onStep, signal) {
  const body = {
    ...asked.body, ...options, stream: true, stream_options: { include_usage: true },
    return_token_ids: true, return_token_strs: true, return_token_origins: true,
  };
  let text = "", metrics = null, usage = null, reason = null, joined = "";
  for await (const event of events(asked.path, body, signal)) {
    const [choice] = event.choices;
    if (event.metrics) ({ metrics, usage } = event);
    if (!choice) continue;
    text += choice.text ?? choice.delta.content ?? "";
    joined += choice.token_strs.join("");
    reason = choice.finish_reason ?? reason;
    view.add(choice.token_ids, choice.token_strs, choice.token_origins);
    onStep(choice.token_origins);
  }
  await view.mend(async (ids) => (await call("/detokenize", { tokens: ids }, signal)).prompt);
  if (reason === "stop" && joined !== text) view.markEnd();
  return { text, metrics, usage, reason };
}

/** Counts accepted drafts as the steps come. */
class Acceptance {
  constructor() { this.steps = []; this.tokens = 0; this.start = performance.now(); this.first = null; }

  add(origins) {
    this.first ??= performance.now();
    this.tokens += origins.length;
    const accepted = origins.filter((origin) => origin === "accepted").length;
    if (origins.some((origin) => origin !== "target")) this.steps.push(accepted);
  }

  /** Shares of the verify steps that accepted at least 1, 2, ... drafts. */
  shares(k) {
    return Array.from({ length: k }, (_, i) => this.steps.filter((count) => count > i).length / (this.steps.length || 1));
  }

  get length() {
    return this.steps.length ? 1 + this.steps.reduce((sum, count) => sum + count, 0) / this.steps.length : null;
  }

  get perSecond() {
    const seconds = (performance.now() - (this.first ?? this.start)) / 1000;
    return this.tokens > 1 && seconds > 0 ? (this.tokens - 1) / seconds : null;
  }
}

function showAcceptance(acceptance, k) {
  bars($("positions"), acceptance.shares(k).map((share, i) => [`draft ${i + 1}`, share, `${Math.round(share * 100)} %`]));
  $("strip").replaceChildren(...acceptance.steps.slice(-VISIBLE_STEPS).map((count) => {
    const bar = document.createElement("i");
    bar.className = count ? "some" : "none";
    bar.style.height = `${count ? (count / k) * 100 : 6}%`;
    return bar;
  }));
  $("acceptance-note").textContent = !k ? "This run makes no drafts."
    : acceptance.steps.length ? `Shares of ${acceptance.steps.length} verify steps in which at least so many drafts were accepted; below, every step.`
    : "Waiting for the first verify step.";
}

function showNumbers(element, pairs) {
  element.replaceChildren(...pairs.map(([name, value]) => {
    const box = document.createElement("div"), term = document.createElement("dt"), detail = document.createElement("dd");
    term.textContent = name;
    detail.textContent = value ?? "–";
    box.append(term, detail);
    return box;
  }));
}

function showLegend(view = texts) {
  $("legend").replaceChildren(...Object.entries(ORIGINS).map(([origin, meaning]) => {
    const item = document.createElement("li"), sample = document.createElement("span"), count = document.createElement("b");
    sample.className = `token ${origin}`;
    sample.textContent = origin;
    item.title = meaning;
    item.dataset.origin = origin;
    count.textContent = view.count(origin);
    item.append(sample, " ", count);
    return item;
  }));
}

const fixed = (value, digits) => (value == null ? null : value.toFixed(digits));

function showRun(acceptance, metrics) {
  const drafting = metrics?.speculative_decoding;
  showNumbers($("numbers"), [
    ["tokens/s", fixed(acceptance.perSecond, 1)],
    ["first token", metrics ? `${Math.round(metrics.time_to_first_token_ms)} ms` : null],
    ["tokens", String(acceptance.tokens)],
    ["tokens per verify step", fixed(drafting?.mean_acceptance_length ?? acceptance.length, 2)],
    ["drafts accepted", drafting ? `${drafting.num_accepted_draft_tokens} of ${drafting.num_draft_tokens}` : null],
  ]);
}

/** Do something that can be stopped, and say what went wrong. */
async function whileRunning(work) {
  running?.abort();
  const mine = (running = new AbortController());
  $("notice").hidden = true;
  $("stop").disabled = false;
  $("status").textContent = "Running.";
  try {
    await work(mine.signal);
    if (running === mine) $("status").textContent = "Done.";
  } catch (error) {
    if (error.name === "AbortError") $("status").textContent = "Stopped.";
    else complain(error);
  } finally {
    if (running === mine) { running = null; $("stop").disabled = true; }
  }
}

function complain(error) {
  if (error.status === 401) { $("key-field").hidden = false; $("key").focus(); }
  $("notice").textContent = error.message;
  $("notice").hidden = false;
  if (!(error instanceof ApiError)) console.error(error);
}

async function run() {
  await whileRunning(async (signal) => {
    const k = drafts(), asked = await prompt(signal), acceptance = new Acceptance();
    $("single").hidden = false;
    $("pair").hidden = true;
    forgetTrace();
    texts.clear();
    texts.add(asked.ids, asked.texts, asked.ids.map(() => "prompt"));
    texts.element.scrollTop = texts.element.scrollHeight;
    const show = (metrics) => { showAcceptance(acceptance, k); showRun(acceptance, metrics); showLegend(); };
    show(null);
    let pending = false;
    const onStep = (origins) => {
      acceptance.add(origins);
      if (pending) return;
      pending = true;
      requestAnimationFrame(() => { pending = false; show(null); });
    };
    showCurl(asked, k);
    const { text, metrics } = await stream(texts, asked, settings(k), onStep, signal);
    await new Promise(requestAnimationFrame);
    show(metrics);
    if (asked.messages) {
      conversation = [...asked.messages, { role: "assistant", content: text }];
      $("input").value = "";
      $("reset").hidden = false;
    }
  });
}

async function compare() {
  await whileRunning(async (signal) => {
    const k = drafts();
    if (!k) throw new ApiError("choose a k above 0 to compare with", 0);
    const asked = await prompt(signal);
    const options = settings(k);
    options.seed ??= Math.floor(Math.random() * 2 ** 31);
    $("single").hidden = true;
    $("pair").hidden = false;
    $("right-title").textContent = `k = ${k}, ${model.speculative.method}`;
    $("verdict").textContent = "Running both, one after the other.";
    for (const id of ["bar-left", "bar-right"]) $(id).replaceChildren();
    forgetTrace();
    left.clear(); right.clear();
    left.before = right.before = asked.ids;
    // Afterwards both find the prompt in the cache.
    for await (const _ of events(asked.path, { ...asked.body, ...options, max_tokens: 1, stream: true }, signal));
    const results = [];
    for (const [view, drafted] of [[left, 0], [right, k]]) {
      const acceptance = new Acceptance();
      const onStep = (origins) => { acceptance.add(origins); showLegend(view); if (drafted) showAcceptance(acceptance, k); };
      results.push(await stream(view, asked, { ...options, speculation: { k: drafted } }, onStep, signal));
    }
    showVerdict(...results, k);
  });
}

function showVerdict(plain, drafted, k) {
  const times = [plain, drafted].map(({ metrics }) => metrics.time_to_first_token_ms + metrics.generation_time_ms);
  const same = plain.text === drafted.text, gain = times[0] / times[1], saved = times[0] - times[1];
  const speed = saved >= 0 ? `${seconds(saved)} saved, ${gain.toFixed(2)} times as fast` : `${seconds(-saved)} lost, ${gain.toFixed(2)} times as fast`;
  $("verdict").textContent = `${same ? "The same text" : "The texts differ!"} (${plain.usage.completion_tokens} tokens). With k = ${k}: ${speed}.`;
  $("verdict").dataset.same = same;
  [["bar-left", plain, times[0]], ["bar-right", drafted, times[1]]].forEach(([id, result, time]) => {
    const bar = document.createElement("i");
    bar.style.width = `${(time / Math.max(...times)) * 55}%`;
    const perSecond = result.usage.completion_tokens / (time / 1000);
    $(id).replaceChildren(bar, `${seconds(time)}, ${perSecond.toFixed(0)} tokens/s`);
  });
}

const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;

function showCurl(asked, k) {
  const shown = asked.messages ? asked.body : { prompt: $("input").value };
  const body = JSON.stringify({ ...shown, ...settings(k) }).replaceAll("'", "'\\''");
  $("curl").textContent = `curl ${new URL(asked.path.slice(1), location.href)} -H 'content-type: application/json' -d '${body}'`;
}

// ---- what a token read

async function pick(view, index) {
  const position = view.before.length + index;
  if (position === 0) {
    forgetTrace();
    $("read-note").textContent = "The first token has nothing before it.";
    return;
  }
  try {
    const found = await call("/trace", { tokens: view.ids.slice(0, position), top_logprobs: 6 });
    traced?.view.showRead(() => false);
    traced = { view, index, ...found };
    showTrace();
  } catch (error) { complain(error); }
}

function forgetTrace() {
  traced?.view.showRead(() => false);
  traced = null;
  $("map-frame").hidden = true;
  $("read-note").textContent = "Click a token, or move to it with the arrow keys and press Enter.";
}

function showTrace() {
  const { view, index, layers, position, dense_layers: dense } = traced, token = view.tokens[index];
  const rows = mapRows(layers);
  $("map-frame").hidden = false;
  const before = $("row").value;
  $("row").replaceChildren(new Option("nothing", "-1"), ...rows.map((row, i) => new Option(row.label, i)));
  $("row").value = Number(before) < rows.length && before !== "" ? before : rows.length ? "0" : "-1";
  const counts = rows.map((row) => row.selected.length);
  const unit = layers[0]?.unit, what = unit === 1 ? "tokens" : `blocks of ${unit} tokens`;
  const range = Math.min(...counts) === Math.max(...counts) ? `${counts[0]}` : `${Math.min(...counts)} to ${Math.max(...counts)}`;
  const denseNote = dense.length ? ` ${dense.length > 1 ? "Layers" : "Layer"} ${dense.join(", ")} read everything.` : "";
  $("read-note").textContent = `${JSON.stringify(token.text)}, ${token.origin}, at position ${position}. `
    + (rows.length ? `Its sparse layers read ${range} of ${Math.ceil(position / unit)} ${what}.${denseNote}` : "The model has no sparse layers.");
  $("map").setAttribute("aria-label", $("read-note").textContent);
  bars($("likely"), traced.top_logprobs.map(({ token: text, logprob }) => {
    const share = Math.exp(logprob);
    return [JSON.stringify(text), share, `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`];
  }), true);
  drawTrace();
}

function drawTrace() {
  if (!traced) return;
  const { view, layers, position } = traced, rows = mapRows(layers), chosen = Number($("row").value);
  traced.drawn = map($("map"), layers, position, chosen);
  const row = rows[chosen], read = row && new Set(row.selected);
  view.showRead((i) => i < position && Boolean(row) && read.has(Math.floor(i / row.unit)));
}

// ---- the server

const feed = []; // [seconds, generated tokens]

async function watchServer() {
  for (;;) {
    try {
      for await (const stats of events("/v1/stats")) showServer(stats);
    } catch { $("model").dataset.state = "away"; }
    await new Promise((resolve) => setTimeout(resolve, 3000));
  }
}

function showServer(stats) {
  delete $("model").dataset.state;
  feed.push([stats.uptime_seconds, stats.generated_tokens]);
  if (feed.length > FEED_POINTS) feed.shift();
  const rates = feed.slice(1).map(([time, count], i) => Math.max(0, (count - feed[i][1]) / (time - feed[i][0])));
  line($("spark"), rates, FEED_POINTS);
  showNumbers($("server"), [
    ["running", stats.running], ["waiting", stats.waiting], ["cache in use", `${(stats.cache_usage * 100).toFixed(0)} %`],
    ["tokens written", stats.generated_tokens.toLocaleString("en")],
    ["tokens per verify step", fixed(stats.recent_acceptance_length ?? stats.acceptance_length, 2)],
  ]);
  const phases = ["target", "verify", "draft"].map((name) => [name, stats[`${name}_seconds`]]);
  const total = phases.reduce((sum, [, time]) => sum + time, 0);
  $("phases").hidden = !total;
  const shares = phases.map(([name, time]) => [name, time / total]).filter(([, share]) => share > 0);
  $("phases").setAttribute("aria-label", "Time in steps: " + shares.map(([name, share]) => `${name} ${Math.round(share * 100)} %`).join(", "));
  $("phases").replaceChildren(...shares.map(([name, share]) => {
    const box = document.createElement("i");
    box.style.width = `${share * 100}%`;
    box.textContent = share > 0.22 ? `${name} ${Math.round(share * 100)} %` : share > 0.14 ? name : "";
    box.title = `${name}: ${Math.round(share * 100)} % of the steps' time`;
    return box;
  }));
}

async function connect() {
  try {
    [model] = (await call("/v1/models")).data;
  } catch (error) { complain(error); return; }
  const { method, k } = model.speculative;
  $("key-field").hidden = true;
  $("notice").hidden = true;
  $("model").textContent = `${model.id} · ${k ? `${method}, up to ${k} drafts` : "no drafts"} · context ${model.max_model_len}`;
  $("proposer").replaceChildren(...(k ? [new Option(method, method)] : []), new Option("off", "off"));
  $("k").max = k;
  $("k").value = k;
  $("k-shown").textContent = k;
  $("k").disabled = $("compare").disabled = !k;
  showLegend();
  watchServer();
}

// ---- theme, keys, start

const THEMES = { "": ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  const [sign, meaning] = THEMES[name];
  $("theme").textContent = sign;
  $("theme").setAttribute("aria-label", `Theme: ${meaning}`);
  $("theme").title = `Theme: ${meaning}`;
  try { localStorage.setItem("theme", name); } catch { /* private window */ }
  drawTrace();
}

function start() {
  let theme = "";
  try { theme = localStorage.getItem("theme") ?? ""; } catch { /* private window */ }
  setTheme(theme in THEMES ? theme : "");
  $("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    setTheme(names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length]);
  });
  $("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
  $("compare").addEventListener("click", compare);
  $("stop").addEventListener("click", () => running?.abort());
  $("reset").addEventListener("click", () => {
    conversation = [];
    texts.clear(); forgetTrace(); showLegend();
    $("reset").hidden = true;
    $("input").focus();
  });
  $("k").addEventListener("input", () => { $("k-shown").textContent = $("k").value; });
  $("proposer").addEventListener("change", () => { $("k").disabled = $("compare").disabled = $("proposer").value === "off"; });
  $("row").addEventListener("change", drawTrace);
  $("map").addEventListener("click", (event) => {
    const row = traced?.drawn.rowAt(event.offsetY) ?? -1;
    if (row >= 0) { $("row").value = row; drawTrace(); }
  });
  for (const radio of document.querySelectorAll("input[name=kind]")) {
    radio.addEventListener("change", () => {
      $("input").placeholder = isChat() ? "Ask something" : "Begin a text";
      $("reset").hidden = !isChat() || !conversation.length;
    });
  }
  $("key").addEventListener("change", () => { setKey($("key").value); connect(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); }
  });
  let width = 0;
  new ResizeObserver(() => { if ($("map").clientWidth !== width) { width = $("map").clientWidth; drawTrace(); } }).observe($("map"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawTrace);
  for (const view of [texts, left, right]) view.onMove = (token) => { $("status").textContent = `${JSON.stringify(token.text)}, ${token.origin}`; };
  connect();
}

start();
