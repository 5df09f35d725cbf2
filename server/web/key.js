// The API key, where the server asks for one. It is kept for this tab alone, until the tab is closed.

const STORED = "jaxpage-api-key";
const form = document.getElementById("key-form");
const field = document.getElementById("key");

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(STORED, field.value);
  form.reset();
});

/** What every request carries. */
export function keyHeaders() {
  const key = sessionStorage.getItem(STORED);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Show, or hide, where the key is written. */
export function askForKey(isAsked) {
  form.hidden = !isAsked;
}
