// The list of messages. In: text, piece by piece. Out: the elements that show it, each with a button that copies it.

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
  #note = make("p", "note", "");
  #onGrow;

  constructor(role, text, onGrow) {
    this.#onGrow = onGrow;
    this.#text = document.createTextNode(text);
    const body = make("div", "body", "");
    body.append(this.#text);
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
    this.#onGrow();
  }

  end(note) {
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
