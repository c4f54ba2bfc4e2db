"use strict";

const $ = id => document.getElementById(id);
const messages = [];
let model = "", chats = true, running = null;

// The page is served under a path that may have something before it.
const url = path => new URL(path, document.baseURI);

async function start() {
  try {
    const list = await (await fetch(url("v1/models"))).json();
    model = list.data[0].id;
    $("model").textContent = model;
  } catch (e) {
    note(`The server does not answer: ${e.message}`);
  }
  poll();
}

function add(kind, text) {
  const e = document.createElement("div");
  e.className = `message ${kind}`;
  e.textContent = text;
  $("messages").append(e);
  e.scrollIntoView({block: "end"});
  return e;
}

const note = text => add("note", text);

// events yields the data of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    rest += value;
    for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
      const line = rest.slice(0, end);
      if (line.startsWith("data: ")) yield line.slice(6);
    }
  }
}

async function ask(text) {
  messages.push({role: "user", content: text});
  add("user", text);
  const answer = add("assistant", "");
  const body = {stream: true};
  if ($("temperature").value) body.temperature = Number($("temperature").value);
  if ($("tokens").value) body.max_tokens = Number($("tokens").value);
  running = new AbortController();
  $("stop").hidden = false;
  $("send").hidden = true;
  let said = "";
  try {
    let response = null;
    if (chats) {
      response = await send("v1/chat/completions", {...body, messages});
      if (response.status === 404) {
        chats = false;
        note("The model has no chat template: it continues the text of all messages.");
      }
    }
    if (!chats) response = await send("v1/completions", {max_tokens: 256, ...body, prompt: messages.map(m => m.content).join("")});
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const e = JSON.parse(data);
      if (e.error) throw new Error(e.error.message);
      const choice = e.choices[0];
      said += choice ? choice.text ?? choice.delta.content ?? "" : "";
      const end = $("messages").scrollHeight - $("messages").scrollTop - $("messages").clientHeight < 40;
      answer.textContent = said;
      if (end) answer.scrollIntoView({block: "end"});
    }
  } catch (e) {
    if (e.name !== "AbortError") note(e.message);
  }
  if (said) {
    messages.push({role: "assistant", content: said});
  } else {
    messages.pop();
    answer.remove();
  }
  running = null;
  $("stop").hidden = true;
  $("send").hidden = false;
  $("text").focus();
}

const send = (path, body) => fetch(url(path), {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body), signal: running.signal});

// State of the server. Histories have a value for each poll.
const history = {live: [], waiting: [], out: [], in: []};
const kept = 80, every = 500;
let before = null;

async function poll() {
  if (!document.hidden) {
    try {
      const now = {time: performance.now()};
      for (const line of (await (await fetch(url("metrics"))).text()).split("\n")) {
        const [name, value] = line.split(" ");
        if (line[0] !== "#") now[name] = Number(value);
      }
      show(now);
    } catch (e) { /* the server may be back later */ }
  }
  setTimeout(poll, every);
}

function show(now) {
  const rate = name => before ? (now[name] - before[name]) / (now.time - before.time) * 1e3 : 0;
  const state = {
    live: now.leanlm_texts_live, waiting: now.leanlm_texts_waiting,
    out: rate("leanlm_completion_tokens_total"), in: rate("leanlm_prompt_tokens_total"),
  };
  for (const name in state) {
    history[name].push(state[name]);
    history[name].splice(0, history[name].length - kept);
    $(name).textContent = Math.round(state[name]);
  }
  const capacity = now.leanlm_cache_tokens, used = capacity - now.leanlm_cache_free_tokens;
  $("places").textContent = now.leanlm_batch_texts;
  $("used").textContent = used;
  $("capacity").textContent = capacity;
  $("shared").textContent = now.leanlm_shared_tokens_total;
  stack($("batch"), [history.live, history.waiting], now.leanlm_batch_texts);
  bar($("cache"), used / capacity);
  stack($("speed"), [history.out, history.in], 1);
  before = now;
}

const color = name => getComputedStyle(document.documentElement).getPropertyValue(name);

// stack draws histories as columns, one above the other.
function stack(canvas, parts, least) {
  const c = canvas.getContext("2d"), width = canvas.width / kept;
  c.clearRect(0, 0, canvas.width, canvas.height);
  let top = least;
  for (let i = 0; i < parts[0].length; i++) top = Math.max(top, parts.reduce((sum, p) => sum + p[i], 0));
  for (let i = 0; i < parts[0].length; i++) {
    let y = canvas.height;
    parts.forEach((p, j) => {
      const h = p[i] / top * (canvas.height - 4);
      c.fillStyle = color(["--live", "--waiting"][j]);
      c.fillRect((kept - parts[0].length + i) * width, y - h, width - 1, h);
      y -= h;
    });
  }
}

function bar(canvas, share) {
  const c = canvas.getContext("2d");
  c.clearRect(0, 0, canvas.width, canvas.height);
  c.fillStyle = color("--live");
  c.fillRect(0, 0, canvas.width * share, canvas.height);
}

$("form").addEventListener("submit", e => {
  e.preventDefault();
  const text = $("text").value;
  if (!text || running) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", e => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
    e.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => {
  if (running) running.abort();
  messages.length = 0;
  $("messages").replaceChildren();
});
start();
