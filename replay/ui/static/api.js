// Questions to the server. The page's own address has the token, so relative paths do.

async function read(answer) {
  const found = await answer.json();
  if (answer.status === 401) await wanted();
  if (!answer.ok) throw new Error(found.error?.message ?? found.error ?? `status ${answer.status}`);
  return found;
}

// On a server the admin key is asked for, and kept for this tab alone.
let asking = null;
function wanted() {
  sessionStorage.removeItem("leftfold-key");
  asking ??= new Promise((done) => {
    const dialog = document.createElement("dialog");
    const form = document.createElement("form");
    const input = document.createElement("input");
    const text = document.createElement("label");
    form.method = "dialog";
    input.type = "password";
    input.id = "admin-key";
    input.autocomplete = "off";
    text.append("admin key", input);
    form.append(text);
    dialog.append(form);
    dialog.addEventListener("close", () => {
      sessionStorage.setItem("leftfold-key", input.value);
      dialog.remove();
      asking = null;
      done();
    });
    form.addEventListener("submit", (event) => { event.preventDefault(); dialog.close(); });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}

const key = () => sessionStorage.getItem("leftfold-key");
const headers = () => (key() ? { authorization: `Bearer ${key()}` } : {});

export async function get(name, query = {}) {
  const text = new URLSearchParams(Object.entries(query).filter(([, value]) => value != null)).toString();
  return read(await fetch(`api/${name}${text ? `?${text}` : ""}`, { headers: headers() }));
}

export async function post(name, body) {
  const sent = { "content-type": "application/json", ...headers() };
  return read(await fetch(`api/${name}`, { method: "POST", headers: sent, body: JSON.stringify(body) }));
}

// The newest question of a kind wins: answers to older ones are dropped, and at most one is under way.
export function newest(ask, take, fail) {
  let wanted = null;
  let busy = false;
  return async function again(...args) {
    wanted = args;
    if (busy) return;
    busy = true;
    while (wanted) {
      const asked = wanted;
      wanted = null;
      try {
        const found = await ask(...asked);
        if (!wanted) take(found, ...asked);
      } catch (error) {
        if (!wanted) fail(error);
      }
    }
    busy = false;
  };
}
