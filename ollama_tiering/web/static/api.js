// What the server is asked. An error has a message for people, and maybe a cure.

export class Refused extends Error {
  constructor(said) {
    super(said.error);
    this.hint = said.hint;
  }
}

async function asked(path, options) {
  let answer;
  try {
    answer = await fetch(`/api/${path}`, options);
  } catch {
    throw new Refused({ error: "the server of this page does not answer", hint: "tiering web" });
  }
  const said = await answer.json();
  if (!answer.ok) throw new Refused(said);
  return said;
}

export const get = (path) => asked(path);

export const change = (path, what) =>
  asked(path, { method: "POST", body: JSON.stringify(what), headers: { "X-Tiering-Change": "1" } });
