// The page: asks how the engine stands while it can be seen, and tells the numbers, the map and the chat.

import { BlockMap } from "./block_map.js";
import { Chat } from "./chat.js";
import { askForKey, keyHeaders } from "./key.js";
import { Numbers } from "./numbers.js";

const POLL_MS = 500;
const RETRY_MS = 2000;
const TIMEOUT_MS = 5000;

const NOTICES = {
  loading: "The model is loading. The chat opens as soon as it is ready.",
  stopping: "The server is shutting down and takes no new requests.",
  dead: "The engine has died: the server's log has the cause, and a restart is needed.",
  locked: "This server needs an API key.",
  unreachable: "The server does not answer. Trying again every two seconds.",
};

const model = document.getElementById("model");
const state = document.getElementById("state");
const notice = document.getElementById("notice");
const chat = new Chat();
const numbers = new Numbers();
const map = new BlockMap();

async function watch() {
  while (true) {
    if (document.hidden) await new Promise((seen) => document.addEventListener("visibilitychange", seen, { once: true }));
    const live = await ask();
    showState(live?.state ?? "unreachable");
    if (live?.model) {
      model.textContent = live.model;
      document.title = `${live.model} · jaxpage`;
      numbers.show(live);
      map.show(live.blocks, chat.shortId);
    }
    await new Promise((over) => setTimeout(over, live ? POLL_MS : RETRY_MS));
  }
}

/** What /live tells, or that it tells nothing without a key; null when nothing answers. */
async function ask() {
  try {
    const response = await fetch("live", { headers: keyHeaders(), signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (response.status === 401) return { state: "locked" };
    return response.ok ? await response.json() : null;
  } catch {
    return null;
  }
}

function showState(name) {
  if (state.dataset.state === name) return; // a screen reader says each change
  state.dataset.state = name;
  state.textContent = name;
  notice.textContent = NOTICES[name] ?? "";
  notice.hidden = !(name in NOTICES);
  askForKey(name === "locked");
  chat.isAvailable = name === "ready";
}

watch();
