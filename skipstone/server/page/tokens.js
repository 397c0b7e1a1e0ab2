// A text made of tokens, coloured by where they come from, to be walked through by mouse and keyboard.

const BROKEN = "\uFFFD"; // a token that is a part of a character

export const ORIGINS = {
  prompt: "prompt",
  accepted: "accepted draft",
  recovered: "recovered: chosen instead of a draft",
  bonus: "bonus: after drafts that were all accepted",
  target: "target: made without drafts",
};

export class TokenView {
  /** `onPick(view, index)` is called for the token that was clicked, or on which Enter was pressed. */
  constructor(element, onPick) {
    this.element = element;
    this.onPick = onPick;
    this.onMove = null; // told of the token that the keyboard has moved to
    this.before = []; // ids of tokens that are not shown
    this.tokens = []; // {id, text, origin}
    this.spans = [];
    this.current = -1;
    element.addEventListener("click", (event) => {
      const index = this.spans.indexOf(event.target);
      if (index >= 0) { this.moveTo(index, false); this.onPick(this, index); }
    });
    element.addEventListener("keydown", (event) => this.onKey(event));
  }

  clear() {
    this.before = []; this.tokens = []; this.spans = []; this.current = -1;
    this.element.replaceChildren();
  }

  /** Tokens behind those that are there. */
  add(ids, texts, origins) {
    const atEnd = this.element.scrollHeight - this.element.scrollTop - this.element.clientHeight < 40;
    ids.forEach((id, i) => {
      const origin = origins[i], span = document.createElement("span");
      span.className = `token ${origin}`;
      span.textContent = texts[i]; // never as HTML
      span.title = ORIGINS[origin];
      this.tokens.push({ id, text: texts[i], origin });
      this.spans.push(span);
      this.element.append(span);
    });
    if (atEnd) this.element.scrollTop = this.element.scrollHeight;
  }

  /** Put whole characters where their bytes came in several tokens. `decode(ids)` gives a text. */
  async mend(decode) {
    for (let first = 0; first < this.tokens.length; first++) {
      if (!this.tokens[first].text.includes(BROKEN)) continue;
      let end = first;
      while (end < this.tokens.length && this.tokens[end].text.includes(BROKEN)) end++;
      const text = await decode(this.tokens.slice(first, end).map((token) => token.id));
      this.spans[first].textContent = text;
      for (let i = first + 1; i < end; i++) this.spans[i].textContent = "";
      first = end;
    }
  }

  /** The last token ended the text and is no part of it. */
  markEnd() { this.spans.at(-1)?.classList.add("end"); }

  count(origin) {
    return this.tokens.filter((token) => token.origin === origin).length + (origin === "prompt" ? this.before.length : 0);
  }
  get ids() { return [...this.before, ...this.tokens.map((token) => token.id)]; }

  moveTo(index, scroll = true) {
    this.spans[this.current]?.classList.remove("current");
    this.current = Math.max(0, Math.min(index, this.spans.length - 1));
    const span = this.spans[this.current];
    span?.classList.add("current");
    if (scroll) { span?.scrollIntoView({ block: "nearest" }); this.onMove?.(this.tokens[this.current]); }
  }

  /** Mark the tokens at these positions as read. */
  showRead(isRead) { this.spans.forEach((span, i) => span.classList.toggle("read", isRead(this.before.length + i))); }

  onKey(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    if (event.ctrlKey || event.metaKey || event.altKey || !this.spans.length) return;
    if (event.key in steps) this.moveTo(this.current < 0 ? 0 : this.current + steps[event.key]);
    else if (event.key === "Home") this.moveTo(0);
    else if (event.key === "End") this.moveTo(this.spans.length - 1);
    else if ((event.key === "Enter" || event.key === " ") && this.current >= 0) this.onPick(this, this.current);
    else return;
    event.preventDefault();
  }
}
