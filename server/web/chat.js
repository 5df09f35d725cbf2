// The chat: what has been said, the answer that streams in, how to stop it, and what to show when it fails.
// In: the form's elements, and whether the server takes requests. Out: requests to the chat route.

import { chatChunks, ChatError } from "./stream.js";
import { MessageList } from "./messages.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

export class Chat {
  #form = document.getElementById("chat-form");
  #prompt = document.getElementById("prompt");
  #send = document.getElementById("send");
  #stop = document.getElementById("stop");
  #progress = document.getElementById("progress");
  #messages = new MessageList(document.getElementById("messages"));
  /** What has been said, as the route takes it; the system prompt is put in front of it each time. */
  #history = [];
  /** Aborts the answer that is streaming in; null when none is. */
  #abort = null;
  #isAvailable = false;
  #responseId = "";

  constructor() {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    this.#prompt.addEventListener("keydown", (event) => {
      // While a word is being composed, as in Japanese, Enter belongs to the composition.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#ask();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#abort?.abort();
    });
    this.#stop.addEventListener("click", () => this.#abort?.abort());
    document.getElementById("new-chat").addEventListener("click", () => this.#clear());
    this.#show();
  }

  /** Whether a request would be served now, as far as the page knows. */
  set isAvailable(value) {
    this.#isAvailable = value;
    this.#show();
  }

  /** What /live calls the newest request. */
  get shortId() {
    return this.#responseId.split("-").at(-1).slice(0, 8);
  }

  async #ask() {
    const text = this.#prompt.value.trim();
    if (!text || this.#abort || !this.#isAvailable) return;
    this.#markField(null);
    const question = { role: "user", content: text };
    const abort = (this.#abort = new AbortController());
    this.#prompt.value = "";
    this.#show();
    this.#progress.textContent = "Generating";
    const asked = this.#messages.add("user", text);
    const answer = this.#messages.add("assistant", "");
    let ending = "";
    let isComplete = false;
    try {
      ending = await this.#receive(answer, { ...this.#sampling(), messages: [...this.#said(), question] }, abort.signal);
      isComplete = true;
    } catch (error) {
      ending = abort.signal.aborted ? "stopped" : this.#showError(error);
    } finally {
      if (this.#abort === abort) this.#abort = null;
    }
    if (!asked.isShown) return; // the chat was cleared meanwhile
    answer.end(answer.text || !isComplete ? ending : `an empty answer · ${ending}`);
    if (answer.text) {
      this.#history.push(question, { role: "assistant", content: answer.text });
    } else if (!isComplete) {
      // Nothing was answered: the question goes back to where it was written.
      if (!this.#prompt.value) this.#prompt.value = text;
      asked.remove();
      answer.remove();
    }
    if (isComplete || abort.signal.aborted) this.#progress.textContent = isComplete ? "Answer complete" : "Stopped";
    this.#show();
  }

  /** Lets `answer` grow until it is complete; returns a line about how it went. */
  async #receive(answer, request, signal) {
    const started = performance.now();
    let first = null;
    let usage = null;
    let reason = null;
    for await (const chunk of chatChunks(request, signal)) {
      this.#responseId = chunk.id;
      usage = chunk.usage ?? usage;
      const [choice] = chunk.choices;
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const { content, reasoning_content: reasoning } = choice.delta;
      if (content || reasoning) first ??= performance.now();
      if (reasoning) answer.appendReasoning(reasoning);
      if (content) answer.append(content);
    }
    return summary(usage, reason, first === null ? null : first - started, performance.now() - started);
  }

  #said() {
    const system = this.#form.elements.system.value.trim();
    return system ? [{ role: "system", content: system }, ...this.#history] : this.#history;
  }

  /** The sampling fields that are filled in. Throws a ChatError for one that is no number. */
  #sampling() {
    const fields = {};
    for (const name of NUMBERS) {
      const input = this.#form.elements[name];
      if (input.validity.badInput) throw new ChatError(`${name} is not a number`, name);
      if (input.value !== "") fields[name] = Number(input.value);
    }
    return fields;
  }

  #showError(error) {
    if (!(error instanceof ChatError)) console.error(error);
    this.#messages.addError(error instanceof ChatError ? error.message : `the page failed: ${error.message}`);
    this.#markField(error.param);
    return "ended early";
  }

  /** Show which field an error is about. */
  #markField(name) {
    for (const field of [...NUMBERS, "system"]) {
      this.#form.elements[field].setAttribute("aria-invalid", String(field === name));
    }
    if (NUMBERS.includes(name)) this.#form.querySelector("details").open = true;
  }

  #clear() {
    this.#abort?.abort();
    this.#abort = null;
    this.#history = [];
    this.#messages.clear();
    this.#progress.textContent = "";
    this.#show();
    this.#prompt.focus();
  }

  #show() {
    const isGenerating = this.#abort !== null;
    const hasFocus = [this.#send, this.#stop].includes(document.activeElement);
    this.#messages.isBusy = isGenerating;
    this.#stop.hidden = !isGenerating;
    this.#send.hidden = isGenerating;
    this.#send.disabled = !this.#isAvailable;
    if (hasFocus) (isGenerating ? this.#stop : this.#send).focus(); // each takes the other's place
  }
}

function summary(usage, reason, firstMs, totalMs) {
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} tokens in${cached ? ` (${cached} cached)` : ""}`);
    parts.push(`${usage.completion_tokens} out`);
    if (firstMs !== null && usage.completion_tokens > 1 && totalMs > firstMs) {
      const rate = ((usage.completion_tokens - 1) / (totalMs - firstMs)) * 1000;
      parts.push(`${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`);
    }
  }
  if (firstMs !== null) parts.push(`first after ${(firstMs / 1000).toFixed(2)} s`);
  if (reason === "length") parts.push("ended at max tokens");
  return parts.join(" · ");
}
