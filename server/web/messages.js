// The list of messages. In: text and reasoning, piece by piece. Out: the elements that show it, each with a button that
// copies its text.

export class MessageList {
  #list;
  #empty;

  constructor(list) {
    this.#list = list;
    this.#empty = list.querySelector(".empty");
  }

  /** While busy, screen readers wait for the whole answer instead of reading each token. */
  set isBusy(value) {
    this.#list.setAttribute("aria-busy", String(value));
  }

  add(role, text) {
    const message = new Message(role, text, () => this.#followEnd());
    this.#put(message.element);
    return message;
  }

  addError(text) {
    const error = make("p", "error", `Error: ${text}`);
    error.setAttribute("role", "alert");
    this.#put(error);
  }

  clear() {
    this.#list.replaceChildren(this.#empty);
  }

  #put(element) {
    this.#empty.remove();
    this.#list.append(element);
    this.#list.scrollTop = this.#list.scrollHeight;
  }

  /** Scroll along with what comes, unless the reader has scrolled up. */
  #followEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#list;
    if (scrollHeight - scrollTop - clientHeight < 60) this.#list.scrollTop = scrollHeight;
  }
}

class Message {
  #text;
  #body;
  /** What the model has said to itself, above the answer; null where it has not. */
  #reasoning = null;
  #note = make("p", "note", "");
  #onGrow;

  constructor(role, text, onGrow) {
    this.#onGrow = onGrow;
    this.#text = document.createTextNode(text);
    const body = make("div", "body", "");
    body.append(this.#text);
    this.#body = body;
    const copy = make("button", "quiet", "Copy");
    copy.type = "button";
    copy.addEventListener("click", () => this.#copy(body, copy));
    const head = make("div", "message-head", "");
    head.append(make("h3", "who", role === "user" ? "You" : "Model"), copy);
    this.element = make("article", `message ${role}`, "");
    this.element.append(head, body, this.#note);
  }

  get text() {
    return this.#text.data;
  }

  get isShown() {
    return this.element.isConnected;
  }

  append(piece) {
    this.#text.appendData(piece);
    this.#reasoning?.end();
    this.#onGrow();
  }

  appendReasoning(piece) {
    if (this.#reasoning === null) {
      this.#reasoning = new Reasoning();
      this.#body.before(this.#reasoning.element);
    }
    this.#reasoning.append(piece);
    this.#onGrow();
  }

  end(note) {
    this.#reasoning?.end();
    this.#note.textContent = note;
    this.#onGrow();
  }

  remove() {
    this.element.remove();
  }

  async #copy(body, button) {
    button.textContent = (await copyText(this.text, body)) ? "Copied" : "Select and copy by hand";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }
}

/** Folded, and opened by whoever wants to read along. */
class Reasoning {
  #text = document.createTextNode("");
  #title = make("summary", "", "Reasoning…");

  constructor() {
    const thoughts = make("div", "thoughts", "");
    thoughts.append(this.#text);
    this.element = make("details", "reasoning", "");
    this.element.append(this.#title, thoughts);
  }

  append(piece) {
    this.#text.appendData(piece);
  }

  end() {
    this.#title.textContent = "Reasoning";
  }
}

/** Browsers give the clipboard only to pages from https or localhost; elsewhere the text is selected and copied. */
async function copyText(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return document.execCommand("copy");
  }
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}
