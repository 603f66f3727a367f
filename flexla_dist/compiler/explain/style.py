"""Look of the page."""

STYLE = """
:root { --ink: #1d2433; --soft: #5d6880; --line: #dfe3ea; --paper: #ffffff; --wash: #f5f7fa;
  --token: #7a4fb5; --chunk: #2463b8; --decay: #b5641b; --merge: #2a7d4f; --padding: #78839a;
  --memory: #4d86d8; --products: #e39a48; --plus: #1d7a46; --minus: #b23a3a; --mark: #c33d69; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8f0; --soft: #98a3b8; --line: #333b4b; --paper: #161b25; --wash: #1e2532;
    --token: #b595ea; --chunk: #79aef2; --decay: #eda868; --merge: #74c998; --padding: #8d98ad;
    --plus: #74c998; --minus: #ef8b8b; --mark: #f281a5; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main, header .inner { max-width: 1180px; margin: 0 auto; padding: 0 28px; }
header { background: var(--wash); border-bottom: 1px solid var(--line); padding: 26px 0 18px; }
h1 { margin: 0; font-size: 27px; letter-spacing: -0.01em; }
h2 { margin: 44px 0 6px; font-size: 20px; border-bottom: 1px solid var(--line); }
h3 { margin: 26px 0 8px; font-size: 16px; }
p.note, .note { color: var(--soft); margin: 4px 0 12px; }
code, pre, .mono, svg text, td.code { font-family: ui-monospace, "SF Mono", Menlo, Consolas,
  "DejaVu Sans Mono", monospace; font-size: 12.5px; }
nav { margin-top: 12px; display: flex; flex-wrap: wrap; gap: 4px 18px; }
nav a { color: var(--chunk); text-decoration: none; }
.chips { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 10px; }
.chip { background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
  padding: 1px 10px; font-size: 13px; }
.chip b { font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(205px, 1fr)); gap: 12px;
  margin: 24px 0 8px; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; }
.card .big { font-size: 20px; font-weight: 600; }
.card .what { color: var(--soft); font-size: 13px; }
.listing { border: 1px solid var(--line); border-radius: 8px; overflow-x: auto;
  padding: 6px 0 10px; }
.listing .stage { padding: 10px 16px 2px; font-size: 13px; font-weight: 600; }
.listing .user { padding: 5px 16px 0; color: var(--soft); white-space: pre; }
.listing .user .no { display: inline-block; width: 40px; text-align: right; margin-right: 14px;
  opacity: 0.7; }
.listing .made { padding: 0 16px 0 70px; white-space: pre; }
.listing .made .name { display: inline-block; min-width: 180px; font-weight: 600; }
.dims { color: var(--soft); font-weight: 400; }
.s-token { color: var(--token); } .s-chunk { color: var(--chunk); }
.s-decay { color: var(--decay); } .s-merge { color: var(--merge); }
.s-padding { color: var(--padding); }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--line);
  padding: 4px 10px 4px 0; white-space: nowrap; }
td { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.r, th.r { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.n { white-space: nowrap; }
tr.first td { border-bottom: none; padding-bottom: 0; }
tr.more td { color: var(--soft); padding-top: 0; font-size: 12.5px; }
tr.sum td { font-weight: 600; } tr.quiet td { color: var(--soft); }
.scroll { overflow-x: auto; }
.bars { min-width: 230px; width: 26%; }
.bar { height: 7px; border-radius: 2px; margin: 3px 0; }
.bar.memory { background: var(--memory); } .bar.products { background: var(--products); }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin: 0 5px 0 14px; }
.diff { white-space: pre; overflow-x: auto; margin: 4px 0 0; }
.plus { color: var(--plus); } .minus { color: var(--minus); }
.bad { color: var(--minus); font-weight: 600; } .good { color: var(--plus); }
.tabs > input { position: absolute; opacity: 0; }
.tabs > label { display: inline-block; padding: 4px 12px; margin: 0 4px 8px 0; cursor: pointer;
  border: 1px solid var(--line); border-radius: 6px; font-size: 13.5px; }
.tabs > input:checked + label { background: var(--ink); color: var(--paper); }
.tabs > input:focus-visible + label { outline: 2px solid var(--chunk); }
.tabs > .panel { display: none; }
.picture { border: 1px solid var(--line); border-radius: 8px; overflow: auto; max-height: 860px;
  background: var(--paper); text-align: center; }
svg.graph { max-width: 100%; height: auto; }
svg.graph text { font-size: 11px; text-anchor: middle; fill: var(--ink); }
svg.graph text.head { font-weight: 700; }
svg.graph .edge { fill: none; stroke: var(--soft); stroke-opacity: 0.38; stroke-width: 1.3; }
svg.graph .edge.on { stroke: var(--mark); stroke-opacity: 1; stroke-width: 2.2; }
svg.graph rect { fill: var(--paper); stroke: var(--soft); stroke-width: 1; }
svg.graph .argument rect { fill: var(--wash); stroke-dasharray: 3 2; }
svg.graph .state rect, svg.graph .grad_next rect { stroke: var(--decay); stroke-dasharray: none; }
svg.graph .token rect { stroke: var(--token); } svg.graph .chunk rect { stroke: var(--chunk); }
svg.graph .decay rect { stroke: var(--decay); } svg.graph .merge rect { stroke: var(--merge); }
svg.graph .product rect { stroke-width: 2.2; fill: var(--wash); }
svg.graph .kernel rect { fill: var(--wash); stroke: var(--chunk); }
svg.graph .scan rect, svg.graph .reverse rect, svg.graph .map rect { stroke: var(--decay); }
svg.graph .node.on rect { stroke: var(--mark); }
details { margin: 8px 0; } td details { margin: 0; } summary { cursor: pointer; }
pre.source { background: var(--wash); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px 16px; overflow: auto; max-height: 700px; line-height: 1.42; tab-size: 4; }
pre.source .c { color: var(--soft); } pre.source .k { color: var(--chunk); }
pre.source .f { color: var(--merge); font-weight: 600; } pre.source .s { color: var(--decay); }
footer { margin: 50px 0 30px; color: var(--soft); font-size: 13px; }
"""

SCRIPT = """
for (const svg of document.querySelectorAll("svg.graph")) {
  const near = (key, on) => {
    const keys = new Set([key]);
    for (const edge of svg.querySelectorAll(".edge")) {
      const touches = edge.dataset.from === key || edge.dataset.to === key;
      if (touches) { keys.add(edge.dataset.from); keys.add(edge.dataset.to); }
      edge.classList.toggle("on", on && touches);
    }
    for (const node of svg.querySelectorAll(".node"))
      node.classList.toggle("on", on && keys.has(node.dataset.key));
  };
  for (const node of svg.querySelectorAll(".node")) {
    node.addEventListener("mouseenter", () => near(node.dataset.key, true));
    node.addEventListener("mouseleave", () => near(node.dataset.key, false));
  }
}
"""
